# SPDX-License-Identifier: Apache-2.0
"""Extension points: what other packages may add, checked when they register.

A package announces a plug-in, a module or an object, by an entry point in the group ``fi_backend.plugins``.
Its functions are marked with `hookimpl` and named as methods of `Hooks`. Our built-ins register in the same
way.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fi_backend.benchmarks.peers import Peer
    from fi_backend.core.spec import AttentionSpec
    from fi_backend.core.variant import AttentionVariant

ENTRY_POINT_GROUP: Final = "fi_backend.plugins"
hookspec = pluggy.HookspecMarker("fi_backend")
hookimpl = pluggy.HookimplMarker("fi_backend")

_BUILT_IN = (
    "fi_backend.benchmarks.shipped_peers",
    "fi_backend.variants",
)


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """An attention layer of a model that an engine has built on this process.

    engine: "vllm" or "sglang". name: as the engine calls it, such as "model.layers.3.self_attn.attn". index:
    its number in the model, None where it has none. spec: heads (of this process), head_dim, dtypes, options.
    device: where tensors among the arguments have to lie. tensor_parallel: (rank, size) of the processes that
    divide the heads: rank r has the r-th part of the query heads. hf_config: the model's configuration as
    Hugging Face's transformers read it. variant, variant_args: what the user asked for by name, None and
    nothing by default; the arguments are values of JSON.
    """

    engine: str
    name: str
    index: int | None
    spec: AttentionSpec
    device: torch.device
    tensor_parallel: tuple[int, int] = (0, 1)
    hf_config: Any = None
    variant: str | None = None
    variant_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LayerVariant:
    """The variant that a layer runs, and its arguments, for as long as the engine lives.

    variant: itself or its registered name; None: plain attention, whatever the user asked for. args: numbers,
    which are fixed, and tensors on the layer's device, which every step reads anew, also in captured graphs:
    write into them to change them. Layers of one variant object share plans.
    """

    variant: AttentionVariant | str | None
    args: Mapping[str, float | Tensor] = field(default_factory=dict)


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

    @hookspec
    def fi_backend_layer_variant(self, layer: AttentionLayer) -> LayerVariant | None:
        """Return what an attention layer of an engine runs, or None to leave it to others.

        Asked for each layer that runs on fi once the weights are loaded, and again where an engine makes
        several objects for one (SGLang: for prefills, for decoding, for drafts). Without an answer the layer
        runs what the user asked for by name, else plain attention.
        """


class Plugins:
    """The registered plug-ins; `peers`, `variants` and `layer_variant` ask them."""

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
        """Register what the installed distributions announce.

        Raises as register() does, and ImportError naming the plug-in that cannot be imported.
        """
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                plugin = entry.load()
            except Exception as error:
                raise ImportError(
                    f"plug-in {entry.name!r} of the group {ENTRY_POINT_GROUP} cannot be imported: "
                    f"{type(error).__name__}: {error}. Mend its package or uninstall it."
                ) from error
            self.register(plugin, entry.name)

    def layer_variant(self, layer: AttentionLayer) -> tuple[str, LayerVariant] | None:
        """Return the plug-in that answers for a layer and its answer, or None where none does.

        Raises TypeError naming the plug-in that returned anything else, ValueError for two answers.
        """
        found: tuple[str, LayerVariant] | None = None
        for implementation in self._manager.hook.fi_backend_layer_variant.get_hookimpls():
            answer = implementation.function(*(layer for _ in implementation.argnames))
            if answer is None:
                continue
            where = f"plug-in {implementation.plugin_name!r}: fi_backend_layer_variant"
            if not isinstance(answer, LayerVariant):
                raise TypeError(f"{where}: expected a LayerVariant or None; got {type(answer).__name__}")
            if found is not None:
                raise ValueError(f"{where}: expected one answer for layer {layer.name}; {found[0]!r} has one")
            found = implementation.plugin_name, answer
        return found

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
