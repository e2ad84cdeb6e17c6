# SPDX-License-Identifier: Apache-2.0
"""`fi-backend build`: compile modules ahead of time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fi_backend import env
from fi_backend.cli.modules import SAME, cached_folder, cpu_specs, cuda_specs
from fi_backend.cli.shell import InputError, console, names, user_input
from fi_backend.core import jit
from fi_backend.core.jit.arch import KNOWN_ARCHS
from fi_backend.core.shipped import VARIANTS
from fi_backend.core.spec import FLOAT_DTYPES, FP8_DTYPES

if TYPE_CHECKING:
    from fi_backend.core.spec import AttentionSpec

_Names = list[str] | None


def build(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    arch: Annotated[
        _Names,
        typer.Option(help="CUDA target such as sm_90a, repeated or with commas (default: the devices here)."),
    ] = None,
    dtype: Annotated[
        _Names, typer.Option(help="Query dtype, repeated or with commas (default: all of the device).")
    ] = None,
    kv_dtype: Annotated[
        _Names, typer.Option(help="KV cache dtype: auto (the query's), float8_e4m3fn, float8_e5m2, ...")
    ] = None,
    head_dim: Annotated[
        _Names, typer.Option(help="CUDA: head dimension, or K and V as 192x128 (default: shipped instances).")
    ] = None,
    variant: Annotated[
        _Names, typer.Option(help=f"CUDA: {', '.join(VARIANTS)}; several at once joined by +.")
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="CPU modules for all servers (AVX2), not for this processor.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help=f"Folder to fill (default: {env.CACHE_DIR.name}).")
    ] = None,
) -> None:
    """Compile the native modules into the cache, so that no engine has to wait for them."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device: expected cpu or cuda; got {device!r}")
    dtypes = names("--dtype", dtype or [], FLOAT_DTYPES)
    kv_dtypes = names("--kv-dtype", kv_dtype or [], (SAME, *FLOAT_DTYPES, *FP8_DTYPES))
    with user_input(variant="--variant"):
        folder = env.cache_dir() if cache is None else cache.expanduser().absolute()
        if device == "cuda":
            archs = names("--arch", arch or [], KNOWN_ARCHS) or _archs_here()
            specs = cuda_specs(dtypes, kv_dtypes, _head_dims(head_dim or []), _split(variant or []))
            _check(specs)
        else:
            for option, value in (("--arch", arch), ("--head-dim", head_dim), ("--variant", variant)):
                if value:
                    raise InputError(f"{option}: expected only with --device cuda; got {', '.join(value)}")
            archs, specs = ["cpu"], cpu_specs(dtypes, kv_dtypes)
    # Imported here: the core needs torch, and the command line has to work where it is missing.
    from fi_backend.core.prepare import modules

    wanted = list(dict.fromkeys(module for each in archs for module in modules(*specs, arch=each)))
    _build(wanted, folder, portable)


def _build(wanted: list[jit.ModuleSpec], folder: Path, portable: bool) -> None:
    before = {module: cached_folder(module, folder) for module in wanted}
    start = time.monotonic()
    libraries = jit.build_all(wanted, portable=portable, cache_dir=folder)
    seconds = time.monotonic() - start

    from rich.table import Table

    table = Table("module", "target", "key", "KiB", "state", box=None, pad_edge=False)
    compiled = 0
    for module, library in zip(wanted, libraries, strict=True):
        fresh = before[module] != library.parent
        compiled += fresh
        state = "[green]compiled[/green]" if fresh else "in the cache"
        key = library.parent.name.removeprefix(f"{module.name}-")
        table.add_row(module.name, module.arch, key, str(library.stat().st_size // 1024), state)
    console().print(table)
    took = f" in {seconds:.1f} s" if compiled else ""
    console().print(
        f"{len(wanted)} modules ready, {compiled} compiled{took}; cache: {folder}", soft_wrap=True
    )


def _archs_here() -> list[str]:
    import torch

    from fi_backend.core.jit.arch import cuda_arch

    found = [cuda_arch(index) for index in range(torch.cuda.device_count())]
    if not found:
        raise InputError("--arch: no CUDA device is here to take it from; name it, such as --arch sm_90a")
    return list(dict.fromkeys(found))


def _check(specs: list[AttentionSpec]) -> None:
    from fi_backend.core.support import unsupported_reason

    for spec in specs:
        if reason := unsupported_reason(spec, "cuda"):
            raise InputError(reason)


def _split(values: list[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",")]


def _head_dims(values: list[str]) -> list[tuple[int, int]]:
    found = []
    for text in _split(values):
        parts = text.split("x")
        if len(parts) > 2 or not all(part.isdecimal() for part in parts):
            raise InputError(f"--head-dim: expected a number, or K and V such as 192x128; got {text!r}")
        found.append((int(parts[0]), int(parts[-1])))
    return found
