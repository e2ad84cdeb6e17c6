# SPDX-License-Identifier: Apache-2.0
"""What this host's processor can execute, and the common subset that portable modules are built for."""

from __future__ import annotations

import json
import platform
import re
from functools import cache

from fi_backend.errors import BuildError

# The names of /proc/cpuinfo that decide whether compiled code runs. On x86 most flags describe the
# system, not instructions a compiler emits; requiring those would refuse machines that fit.
_X86_INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|bmi|fma|f16c|abm|movbe|popcnt|cx16|pni|aes|vaes|pclmul|vpclmul|gfni|sha|adx)\w*"
)
# x86-64-v3 is AVX2 and FMA: every server since 2015. machine -> (flags of the compiler, features).
_PORTABLE = {
    "x86_64": (
        ("-march=x86-64-v3",),
        "abm avx avx2 bmi1 bmi2 cx16 f16c fma movbe pni popcnt sse sse2 sse4_1 sse4_2 ssse3",
    ),
    "aarch64": (("-march=armv8-a",), "asimd fp"),
}


@cache
def host_features() -> frozenset[str]:
    """Return the instruction sets of this host, by the names of /proc/cpuinfo."""
    fields = _cpuinfo()
    if platform.machine() == "x86_64":
        return frozenset(
            name for name in fields.get("flags", "").split() if _X86_INSTRUCTIONS.fullmatch(name)
        )
    return frozenset(fields.get("Features", "").split())


def portable_flags() -> tuple[str, ...]:
    """Return what replaces -march=native in a portable build; raises BuildError on an unknown machine."""
    return _portable()[0]


def portable_features() -> frozenset[str]:
    """Return the instruction sets that a portable build uses."""
    return frozenset(_portable()[1].split())


def host_isa() -> str:
    """Return a text that differs between hosts for which -march=native may differ."""
    return platform.machine() + json.dumps(_cpuinfo(), sort_keys=True)


def _portable() -> tuple[tuple[str, ...], str]:
    machine = platform.machine()
    if machine not in _PORTABLE:
        raise BuildError(f"portable build: known for {', '.join(_PORTABLE)}; this machine is {machine}")
    return _PORTABLE[machine]


@cache
def _cpuinfo() -> dict[str, str]:
    fields: dict[str, str] = {}
    wanted = re.compile(r"(vendor_id|cpu family|model|flags|Features|CPU \w+)\s*:\s*(.*)")
    try:
        # One processor's paragraph: the kernel samples frequencies for each, slow on large machines.
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if not line.strip() and fields:
                    break
                if match := wanted.match(line):
                    fields[match[1]] = match[2]
    except OSError:
        fields = {"processor": platform.processor()}
    return fields
