# SPDX-License-Identifier: Apache-2.0
"""`fi-backend build`: compile modules ahead of time."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from fi_backend import env
from fi_backend.cli.modules import DEFAULT_DTYPES, SAME, cached_folder, cpu_modules
from fi_backend.cli.shell import console, names, user_input
from fi_backend.core import jit
from fi_backend.core.spec import FLOAT_DTYPES, FP8_DTYPES


def build(
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Query dtype, repeated or separated by commas (default: all three)."),
    ] = None,
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="KV cache dtype: auto (the query's), float8_e4m3fn, float8_e5m2, ... (default: auto)."
        ),
    ] = None,
) -> None:
    """Compile the native modules into the cache, so that no engine has to wait for them."""
    dtypes = names("--dtype", dtype or DEFAULT_DTYPES, FLOAT_DTYPES)
    kv_dtypes = names("--kv-dtype", kv_dtype or [SAME], (SAME, *FLOAT_DTYPES, *FP8_DTYPES))
    with user_input():
        folder = env.cache_dir()
    specs = cpu_modules(dtypes, kv_dtypes)
    before = {spec: cached_folder(spec) for spec in specs}
    start = time.monotonic()
    libraries = jit.build_all(specs)
    seconds = time.monotonic() - start

    from rich.table import Table

    table = Table("module", "key", "KiB", "state", box=None, pad_edge=False)
    for spec, library in zip(specs, libraries, strict=True):
        state = "[green]compiled[/green]" if before[spec] is None else "in the cache"
        key = library.parent.name.removeprefix(f"{spec.name}-")
        table.add_row(spec.name, key, str(library.stat().st_size // 1024), state)
    console().print(table)
    compiled = sum(found is None for found in before.values())
    took = f" in {seconds:.1f} s" if compiled else ""
    console().print(f"{len(specs)} modules ready, {compiled} compiled{took}; cache: {folder}", soft_wrap=True)
