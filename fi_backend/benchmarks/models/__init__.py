# SPDX-License-Identifier: Apache-2.0
"""Models made on the spot, with known answers or without weights: nothing is downloaded."""
