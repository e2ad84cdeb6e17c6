# SPDX-License-Identifier: Apache-2.0
"""Extension points: a wrong plug-in is refused when it registers, by name."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.hooks import ENTRY_POINT_GROUP, Plugins, hookimpl, plugins


class Other(Peer):
    name = "other"

    def unavailable(self) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Run:
        raise NotImplementedError


class Good:
    @hookimpl
    def fi_backend_benchmark_peers(self, device: str) -> Sequence[Peer]:
        return [Other()] if device == "cuda" else []


class WithoutArguments:
    @hookimpl
    def fi_backend_benchmark_peers(self) -> Sequence[Peer]:
        return (Other(),)


class WrongArgument:
    @hookimpl
    def fi_backend_benchmark_peers(self, gadget: str) -> Sequence[Peer]:
        return []


class UnknownHook:
    @hookimpl
    def fi_backend_benchmark_pears(self) -> Sequence[Peer]:
        return []


def test_peers_of_a_device() -> None:
    registered = Plugins()
    registered.register(Good(), "good")
    assert [peer.name for peer in registered.peers("cuda")] == ["other"]
    assert registered.peers("cpu") == []


def test_a_hook_may_take_fewer_arguments() -> None:
    registered = Plugins()
    registered.register(WithoutArguments(), "short")
    assert [peer.name for peer in registered.peers("cpu")] == ["other"]


@pytest.mark.parametrize(
    ("plugin", "texts"),
    [
        (WrongArgument(), ("plug-in 'bad'", "fi_backend_benchmark_peers", "gadget")),
        (
            UnknownHook(),
            ("plug-in 'bad'", "fi_backend_benchmark_pears", "the hooks are fi_backend_benchmark_peers"),
        ),
    ],
)
def test_a_wrong_plugin_is_refused_at_registration(plugin: object, texts: Sequence[str]) -> None:
    registered = Plugins()
    with pytest.raises(TypeError) as error:
        registered.register(plugin, "bad")
    assert all(text in str(error.value) for text in texts)
    assert "\n" not in str(error.value)
    # It has left nothing behind: the next plug-in is not blamed for it.
    registered.register(Good(), "good")
    assert len(registered.peers("cuda")) == 1


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (7, "expected a sequence of Peer; got int"),
        ([7], "expected instances of Peer; got int"),
        (None, "expected a sequence of Peer; got NoneType"),
    ],
)
def test_a_wrong_result_names_the_plugin(returned: object, text: str) -> None:
    class Wrong:
        @hookimpl
        def fi_backend_benchmark_peers(self, device: str) -> object:
            return returned

    registered = Plugins()
    registered.register(Wrong(), "wrong")
    with pytest.raises(TypeError, match=f"plug-in 'wrong': fi_backend_benchmark_peers: {text}"):
        registered.peers("cpu")


def test_a_name_comes_once() -> None:
    registered = Plugins()
    registered.register(Good(), "one")
    registered.register(Good(), "two")
    with pytest.raises(ValueError, match=r"plug-in '(one|two)': .*'other', which is taken"):
        registered.peers("cuda")
    with pytest.raises(ValueError, match="one"):
        registered.register(Good(), "one")


def test_the_built_in_peer_is_registered_through_the_hook() -> None:
    assert "vllm-cpu" in [peer.name for peer in plugins().peers("cpu")]
    assert "vllm-cpu" not in [peer.name for peer in plugins().peers("cuda")]


def test_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def entry_points(*, group: str) -> list[SimpleNamespace]:
        asked.append(group)
        return [SimpleNamespace(name="good", load=Good)]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    registered = Plugins()
    registered.load_entry_points()
    assert asked == [ENTRY_POINT_GROUP]
    assert [peer.name for peer in registered.peers("cuda")] == ["other"]
