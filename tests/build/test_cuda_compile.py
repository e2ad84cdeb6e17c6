# SPDX-License-Identifier: Apache-2.0
"""The CUDA modules compile for two targets, spill few registers, and load without a GPU.

`make test` takes instances that between them use every branch of the template; `make test-cuda-all` takes
all that are shipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fi_backend.core import jit
from fi_backend.core.jit.toolkit import find_toolkit
from fi_backend.core.prepare import modules
from fi_backend.core.shipped import instance, shipped
from fi_backend.errors import BuildError

# Target -> bytes that a thread of the worst kernel may spill, nearly all of it between the loops. Threads
# have 168 registers, as twelve warps share a multiprocessor's; on sm_90a consumers take 224. With nvcc 13.0
# the worst are 252 bytes for sm_80 and 136 for sm_90a.
SPILL_LIMIT_BYTES = {"sm_80": 256, "sm_90a": 192}
EXPORTED = {"cuda_attention": "run", "cuda_ops": "append_kv", "cuda_planner": "plan_on_device"}
CHOSEN = (
    instance("bfloat16", "bfloat16", (128, 128)),
    instance("float16", "float8_e4m3fn", (128, 128)),
    instance("bfloat16", "bfloat16", (192, 128)),
    instance("float16", "float16", (256, 256), "soft-cap"),
    instance("bfloat16", "bfloat16", (64, 64), "custom-mask"),
    instance("float16", "float16", (128, 128), "batch-invariant"),
)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[jit.ModuleSpec, Path]:
    """All modules, from the shared cache or compiled in one parallel run: module -> library."""
    try:
        find_toolkit()
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    specs = shipped() if request.config.getoption("--cuda-all", default=False) else CHOSEN
    wanted = [
        module for arch in SPILL_LIMIT_BYTES for module in modules(*specs, arch=arch) if module.arch != "cpu"
    ]
    assert len(wanted) >= 2 * len(specs)
    return dict(zip(wanted, jit.build_all(wanted), strict=True))


def report(library: Path) -> str:
    """What the compiler said of a module, by the folder in its commands: a run builds many."""
    log = (library.parent / "build.log").read_text()
    steps = re.split(r"^\[\d+/\d+\] ", log, flags=re.MULTILINE)
    return "".join(step for step in steps if _folder(step) == library.parent.name)


def spills(library: Path) -> list[int]:
    """The bytes that each kernel of a module stores to local memory, as ptxas reported them."""
    return [int(n) for n in re.findall(r"(\d+) bytes spill stores", report(library))]


def _folder(step: str) -> str | None:
    match = re.search(r" -o (\S+)", step)
    return Path(match[1]).parent.name if match else None


def test_no_kernel_spills_much(built: dict[jit.ModuleSpec, Path]) -> None:
    figures = {module: spills(library) for module, library in built.items()}
    assert all(figures.values()), "every module has the report of at least one kernel"
    over = [
        f"{module.name} {module.arch}: {max(found)} bytes"
        for module, found in figures.items()
        if max(found) > SPILL_LIMIT_BYTES[module.arch]
    ]
    assert over == []


def test_products_stay_what_they_are(built: dict[jit.ModuleSpec, Path]) -> None:
    """No macro is defined twice, which took wgmma out of a module unseen, and ptxas serialises no wgmma."""
    lines = "".join(map(report, built.values())).splitlines()
    found = [line for line in lines if "redefined" in line or "Performance Loss" in line]
    assert found == []


def test_every_module_loads_without_a_gpu(built: dict[jit.ModuleSpec, Path]) -> None:
    for module in built:
        functions = jit.load(module)
        [exported] = [name for start, name in EXPORTED.items() if module.name.startswith(start)]
        assert callable(getattr(functions, exported)), module.name
