# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that decide what each layer of an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fi_backend import variants
from fi_backend.hooks import AttentionLayer, LayerVariant, Plugins, hookimpl


def shipped_plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """The shipped variants, whatever packages are installed."""
    found = Plugins()
    found.register(variants, "shipped")
    monkeypatch.setattr("fi_backend.adapters.layer_variants.plugins", lambda: found)
    monkeypatch.setattr("fi_backend.hooks.plugins", lambda: found)
    return found


def decide(plugins: Plugins, answer: Callable[[AttentionLayer], Any]) -> list[AttentionLayer]:
    """Register a plug-in that answers with `answer(layer)`; returns the list of layers it is asked about."""
    asked: list[AttentionLayer] = []

    class Decides:
        @hookimpl
        def fi_backend_layer_variant(self, layer: AttentionLayer) -> LayerVariant | None:
            asked.append(layer)
            return answer(layer)

    plugins.register(Decides(), "decides")
    return asked
