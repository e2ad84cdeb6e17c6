# SPDX-License-Identifier: Apache-2.0
"""Attention on GPUs beside its peers: `fi-backend bench kernels --device cuda`."""
