# SPDX-License-Identifier: Apache-2.0
"""Whole engines under load: traces, open-loop arrivals, latencies with bounds, sustained rates."""
