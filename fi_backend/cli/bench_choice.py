# SPDX-License-Identifier: Apache-2.0
"""What `bench kernels` was asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from fi_backend.cli.shell import InputError, error_console

if TYPE_CHECKING:
    from fi_backend.benchmarks.peers import Peer


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def chosen_by_name(things: Sequence[_T], only: str) -> list[_T]:
    """Return the things whose name contains one of the texts in `only`, all if it is empty.

    Raises InputError if one of the texts fits none.
    """
    texts = [text.strip() for text in only.split(",") if text.strip()]
    for text in texts:
        if not any(text in each.name for each in things):
            names = ", ".join(each.name for each in things)
            raise InputError(f"--only: expected parts of {names}; got {text!r}")
    return [each for each in things if not texts or any(text in each.name for text in texts)]


def available_peers(device: str, only: str) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that can run here, and why the others cannot, by name.

    only: names separated by commas; empty for all. Raises InputError for a name that no peer has.
    """
    from fi_backend.hooks import plugins

    peers = plugins().peers(device)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = [peer.name for peer in peers]
    for name in wanted:
        if name not in known:
            raise InputError(f"--peers: expected names among {', '.join(known) or 'none'}; got {name!r}")
    with error_console().status("looking for peers"):
        found = [(peer, peer.unavailable()) for peer in peers if not wanted or peer.name in wanted]
    absent = {peer.name: reason for peer, reason in found if reason is not None}
    return [peer for peer, reason in found if reason is None], absent
