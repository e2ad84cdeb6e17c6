# SPDX-License-Identifier: Apache-2.0
"""Measurements that a user can repeat: `fi-backend bench`."""
