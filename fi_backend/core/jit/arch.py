# SPDX-License-Identifier: Apache-2.0
"""Names of CUDA targets: from a device's compute capability to the `sm_..` that its modules are built for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fi_backend.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

# From Hopper on the kernels of a family may use instructions of that one chip ("a" targets). Those that
# are written in plain ones are built for the same name, so that all modules of a device share a cache.
KNOWN_ARCHS = (
    *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"),
    *("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"),
)
MIN_CAPABILITY = (8, 0)


def device_kind(device: torch.device | str | int) -> str:
    """Return the kind of a device, such as "cuda" for "cuda:1"; imports no torch. An index is one of CUDA."""
    if isinstance(device, str):
        return device.partition(":")[0]
    return "cuda" if isinstance(device, int) else device.type


def cuda_arch(device: torch.device | str | int) -> str:
    """Return the CUDA target of a device, such as "sm_90a"; asked of the driver once a device.

    device: torch.device, "cuda", "cuda:1" or an index; without an index, torch's current device.
    Raises UnsupportedError below compute capability 8.0, ValueError if it is no CUDA device.
    """
    import torch

    resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if resolved.type != "cuda":
        raise ValueError(f"device: expected a CUDA device such as 'cuda:0'; got {str(device)!r}.")
    return _arch(torch.cuda.current_device() if resolved.index is None else resolved.index)


def arch_of_capability(major: int, minor: int) -> str:
    """Return the target of a compute capability; raises UnsupportedError below 8.0."""
    if (major, minor) < MIN_CAPABILITY:
        raise UnsupportedError(
            f"device: the kernels need compute capability 8.0 (Ampere) or newer; got {major}.{minor}."
        )
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def shared_kib(arch: str) -> int:
    """Return the KiB of shared memory that a block may have on a target (CUDA C++ Programming Guide, table
    "Technical Specifications per Compute Capability")."""
    number = int(arch.removeprefix("sm_").rstrip("af"))
    if number in (80, 87):
        return 163
    return 227 if 90 <= number < 120 else 99


@cache
def _arch(index: int) -> str:
    import torch

    return arch_of_capability(*torch.cuda.get_device_capability(index))
