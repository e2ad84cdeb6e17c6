# SPDX-License-Identifier: Apache-2.0
"""Compiles the native modules on first use and keeps them in a cache that processes share."""

from fi_backend.core.jit.build import build_all, load
from fi_backend.core.jit.module import ModuleSpec, csrc_root

__all__ = ["ModuleSpec", "build_all", "csrc_root", "load"]
