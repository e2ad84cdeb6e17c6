# SPDX-License-Identifier: Apache-2.0
"""Small models with known answers or known features, made on the spot: nothing is downloaded."""
