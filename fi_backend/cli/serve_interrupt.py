# SPDX-License-Identifier: Apache-2.0
"""An end from outside that leaves neither an engine running nor a record without its report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# SIGHUP: the terminal has gone, whose end would leave the engine, in a session of its own, behind.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP came; number: which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that this signal ended."""
        return 128 + self.number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted for the first SIGINT, SIGTERM or SIGHUP; later ones are ignored until the block ends.

    Engines take seconds to end: an impatient second signal must not leave them behind. A SIGHUP that is
    ignored, as under nohup, stays so. Outside the main thread, where Python handles no signals, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [each for each in _SIGNALS if each is not signal.SIGHUP or not under_nohup]
    before = {each: signal.signal(each, interrupt) for each in caught}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
