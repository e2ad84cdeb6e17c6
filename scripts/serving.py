# SPDX-License-Identifier: Apache-2.0
"""The servers of the package under the name that the scripts use."""

from fi_backend.benchmarks.serving.server import Server, ServerError, SglangServer, VllmServer

__all__ = ["Server", "ServerError", "SglangServer", "VllmServer"]
