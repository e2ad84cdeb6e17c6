# SPDX-License-Identifier: Apache-2.0
"""Extension points: what other packages may add, checked when they register.

A package announces a plug-in, a module or an object, by an entry point in the group ``fi_backend.plugins``.
Its functions are marked with `hookimpl` and named as methods of `Hooks`. Our built-ins register in the same
way.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from fi_backend.benchmarks.peers import Peer
    from fi_backend.core.variant import AttentionVariant

ENTRY_POINT_GROUP: Final = "fi_backend.plugins"
hookspec = pluggy.HookspecMarker("fi_backend")
hookimpl = pluggy.HookimplMarker("fi_backend")

_BUILT_IN = (
    "fi_backend.benchmarks.vllm_cpu",
    "fi_backend.benchmarks.cuda.fa3",
    "fi_backend.benchmarks.cuda.flashinfer_peers",
    "fi_backend.benchmarks.cuda.sglang_peers",
    "fi_backend.variants",
)


class Hooks:
    """The extension points. A hook may take any of the named arguments, or fewer."""

    @hookspec
    def fi_backend_benchmark_peers(self, device: str) -> Sequence[Peer]:  # type: ignore[empty-body]
        """Return other attention implementations to measure beside ours in `fi-backend bench kernels`.

        device: "cpu" or "cuda". Importing the implementation is the business of Peer.unavailable(), which is
        called later; a peer that is not installed is still returned.
        """

    @hookspec
    def fi_backend_attention_variants(self) -> Sequence[AttentionVariant]:  # type: ignore[empty-body]
        """Return variants of attention that `BatchAttention(spec, variant="name")` finds by their names."""


class Plugins:
    """The registered plug-ins; `peers` and `variants` ask them."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("fi_backend")
        self._manager.add_hookspecs(Hooks)

    def register(self, plugin: object, name: str) -> None:
        """Add a plug-in.

        Raises TypeError naming the plug-in, the hook and the wrong argument if a hook does not exist or takes
        an argument that it does not have, and ValueError if the name is taken.
        """
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.get_name(plugin) is not None:
                self._manager.unregister(plugin)
            hooks = ", ".join(hook for hook in vars(Hooks) if hook.startswith("fi_backend_"))
            raise TypeError(f"plug-in {name!r}: {_one_line(error)}; the hooks are {hooks}") from error

    def load_entry_points(self) -> None:
        """Register what the installed distributions announce; raises as register() does."""
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINT_GROUP):
            self.register(entry.load(), entry.name)

    def variants(self) -> dict[str, AttentionVariant]:
        """Return the registered variants by name.

        Raises TypeError naming the plug-in that returned anything else, ValueError for a repeated name.
        """
        from fi_backend.core.variant import AttentionVariant

        found: dict[str, AttentionVariant] = {}
        for implementation in self._manager.hook.fi_backend_attention_variants.get_hookimpls():
            where = f"plug-in {implementation.plugin_name!r}: fi_backend_attention_variants"
            variants = implementation.function()
            if not isinstance(variants, Sequence):
                raise TypeError(
                    f"{where}: expected a sequence of AttentionVariant; got {type(variants).__name__}"
                )
            for variant in variants:
                if not isinstance(variant, AttentionVariant):
                    raise TypeError(
                        f"{where}: expected instances of AttentionVariant; got {type(variant).__name__}"
                    )
                if variant.name in found:
                    raise ValueError(
                        f"{where}: expected a name of its own; got {variant.name!r}, which is taken"
                    )
                found[variant.name] = variant
        return found

    def peers(self, device: str) -> list[Peer]:
        """Return the benchmark peers for a device, in the order of registration.

        Raises TypeError naming the plug-in that returned anything else, ValueError for a repeated name.
        """
        from fi_backend.benchmarks.peers import Peer

        found: dict[str, Peer] = {}
        for implementation in self._manager.hook.fi_backend_benchmark_peers.get_hookimpls():
            where = f"plug-in {implementation.plugin_name!r}: fi_backend_benchmark_peers"
            # Called one by one: pluggy joins the results and forgets whose they are.
            peers = implementation.function(*(device for _ in implementation.argnames))
            if not isinstance(peers, Sequence):
                raise TypeError(f"{where}: expected a sequence of Peer; got {type(peers).__name__}")
            for peer in peers:
                if not isinstance(peer, Peer):
                    raise TypeError(f"{where}: expected instances of Peer; got {type(peer).__name__}")
                if peer.name in found:
                    raise ValueError(
                        f"{where}: expected a name of its own; got {peer.name!r}, which is taken"
                    )
                found[peer.name] = peer
        return list(found.values())


@cache
def plugins() -> Plugins:
    """Return the plug-ins of this process: built-ins first, then those of the installed distributions."""
    registered = Plugins()
    for name in _BUILT_IN:
        registered.register(importlib.import_module(name), name)
    registered.load_entry_points()
    return registered


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
