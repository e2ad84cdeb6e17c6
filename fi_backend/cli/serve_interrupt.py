# SPDX-License-Identifier: Apache-2.0
"""An end from outside that leaves neither an engine running nor a record without its report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; number: which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that this signal ended."""
        return 128 + self.number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted for the first SIGINT or SIGTERM; later ones are ignored until the block is left.

    Engines take seconds to end: an impatient second signal must not leave them behind. Outside the main
    thread, where Python handles no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {each: signal.signal(each, interrupt) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
