# SPDX-License-Identifier: Apache-2.0
"""What a user sees while modules compile: a bar on a terminal, one line at each end elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("fi_backend.jit")


def say(text: str) -> None:
    """Log `text` at INFO, or print it to stderr if no handler would show it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(f"fi_backend: {text}", file=sys.stderr, flush=True)


@contextmanager
def build_progress(names: list[str], objects: int) -> Iterator[Callable[[int, int], None]]:
    """Show the build of the modules `names`; call the value with (steps done, steps in all)."""
    title = names[0] if len(names) == 1 else f"{len(names)} modules"
    start = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("compiling {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(title, total=objects)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        say(f"compiling {title} ({objects} objects)")
        yield lambda _done, _total: None
        say(f"compiled {title} in {time.monotonic() - start:.1f} s")
