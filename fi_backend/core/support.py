# SPDX-License-Identifier: Apache-2.0
"""Which combinations of spec and device exist; asked before anything is compiled or launched."""

from __future__ import annotations

import torch

from fi_backend.core.spec import AttentionSpec

DEVICES = ("cpu",)


def unsupported_reason(
    spec: AttentionSpec,  # noqa: ARG001 - the CPU kernels take every spec
    device: str | torch.device,
) -> str | None:
    """Return why `spec` cannot run on `device`, or None when it can. Compiles and launches nothing."""
    kind = torch.device(device).type
    if kind not in DEVICES:
        return f"device: this version has kernels for {', '.join(DEVICES)}; got {kind!r}."
    return None
