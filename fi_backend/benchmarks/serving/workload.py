# SPDX-License-Identifier: Apache-2.0
"""Workloads by name: generated ones and trace files, with the options that the user typed behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fi_backend.benchmarks.serving.arrivals import Arrival, arrival_times, at_rate
from fi_backend.benchmarks.serving.trace_files import read_trace

Make = Callable[[int, np.random.Generator], list[Arrival]]

# Log-normal lengths with the means that 1000 ShareGPT conversations have: 230 and 203 tokens.
_SHARE_GPT = {"in": (112.0, 1.2), "out": (135.0, 0.9)}
_HELP = (
    "expected sharegpt, uniform, bursty, shared-prefix or the path of a trace, with options as in "
    "uniform:in=256,out=64"
)


@dataclass(frozen=True)
class Workload:
    """What is asked of the server.

    text: as the user wrote it. make: (count, rng) -> arrivals with times of any scale. primers: prefixes
    that lie in the cache before a run begins, as in a server that has been up for long.
    """

    text: str
    make: Make
    primers: tuple[tuple[tuple[int, int], ...], ...] = ()
    samples: int = 1

    def arrivals(self, rate: float, count: int, *, seed: int, run: int) -> list[Arrival]:
        """Return `count` requests at `rate` a second; equal arguments give equal requests.

        The run is part of the seed, which also places the window of a trace; a trace may hold fewer requests.
        """
        made = self.make(count, np.random.default_rng([seed, run]))
        return [replace(each, samples=self.samples) for each in at_rate(made, rate)]


def parse_workload(text: str, *, max_len: int) -> Workload:
    """Return the workload that `text` describes, NAME or NAME:option=value,...; see the documentation.

    max_len: tokens of prompt and answer that the server takes; generated lengths are cut to it, longer
    requests of a trace are left out. Raises ValueError naming the option.
    """
    name, _, rest = text.rpartition(":") if "=" in text.rpartition(":")[2] else (text, "", "")
    options = _options(rest)
    samples = int(_number(options, "n", 1, low=1))
    if name in ("sharegpt", "bursty"):
        cv = _number(options, "cv", 4.0 if name == "bursty" else 1.0)
        made = Workload(text, _share_gpt(cv, max_len), samples=samples)
    elif name == "uniform":
        prompt, answer = (int(_number(options, key, 256, low=1)) for key in ("in", "out"))
        _check_fits(prompt + answer, max_len)
        made = Workload(text, _uniform(prompt, answer, _number(options, "cv", 1.0)), samples=samples)
    elif name == "shared-prefix":
        made = _shared_prefix(text, options, samples, max_len)
    elif Path(name).is_file():
        made = Workload(text, _windows(read_trace(Path(name), max_len=max_len)), samples=samples)
    else:
        raise ValueError(f"workload: {_HELP}; got {text!r}.")
    if options:
        raise ValueError(f"workload: {name} has no option {', '.join(options)}; got {text!r}.")
    return made


def _options(text: str) -> dict[str, str]:
    found = {}
    for entry in filter(None, text.split(",")):
        key, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"workload: expected option=value; got {entry!r}.")
        found[key.strip()] = value.strip()
    return found


def _number(options: dict[str, str], key: str, default: float, *, low: float = 0.0) -> float:
    text = options.pop(key, None)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not value >= low:
        raise ValueError(f"workload: {key}: expected a number >= {low:g}; got {text!r}.")
    return value


def _check_fits(length: int, max_len: int) -> None:
    if length > max_len:
        raise ValueError(
            f"workload: expected prompts and answers of at most {max_len} tokens together; got {length}. "
            "Raise --max-len."
        )


def _share_gpt(cv: float, max_len: int) -> Make:
    def make(count: int, rng: np.random.Generator) -> list[Arrival]:
        times = arrival_times(count, cv, rng)
        drawn = {
            key: np.exp(rng.normal(np.log(median), sigma, count)).round().astype(int)
            for key, (median, sigma) in _SHARE_GPT.items()
        }
        answers = drawn["out"].clip(1, max(max_len // 4, 1))
        prompts = np.minimum(drawn["in"].clip(4), max_len - answers)
        return [
            Arrival(float(at), int(prompt), int(answer))
            for at, prompt, answer in zip(times, prompts, answers, strict=True)
        ]

    return make


def _uniform(prompt: int, answer: int, cv: float) -> Make:
    return lambda count, rng: [Arrival(float(at), prompt, answer) for at in arrival_times(count, cv, rng)]


def _shared_prefix(text: str, options: dict[str, str], samples: int, max_len: int) -> Workload:
    own, answer = (
        int(_number(options, key, default, low=1)) for key, default in (("own", 256), ("out", 128))
    )
    cv = _number(options, "cv", 1.0)
    paths = prefix_paths(_levels(options.pop("levels", "4096/1024*8")))
    length = sum(tokens for _, tokens in paths[0]) + own
    _check_fits(length + answer, max_len)

    def make(count: int, rng: np.random.Generator) -> list[Arrival]:
        times = arrival_times(count, cv, rng)
        chosen = rng.integers(len(paths), size=count)
        return [
            Arrival(float(at), length, answer, paths[index]) for at, index in zip(times, chosen, strict=True)
        ]

    return Workload(text, make, tuple(paths), samples)


def _levels(text: str) -> list[tuple[int, int]]:
    """Parse "4096/1024*8/512*4": tokens of a node, and how many nodes hang on each of the level above."""
    levels = []
    for entry in text.split("/"):
        tokens, _, fanout = entry.partition("*")
        try:
            levels.append((int(tokens), int(fanout or 1)))
        except ValueError:
            levels.append((0, 0))
        if min(levels[-1]) < 1:
            raise ValueError(
                f"workload: levels: expected TOKENS or TOKENS*NODES, parted by /; got {entry!r} in {text!r}."
            )
    return levels


def prefix_paths(levels: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    """Return the path to each leaf of a tree as (id, tokens) of its nodes.

    levels: for each depth the tokens of a node and the number of nodes below each node above.
    """
    paths: list[tuple[tuple[int, int], ...]] = [()]
    used = 0
    for tokens, fanout in levels:
        longer = []
        for path in paths:
            for _ in range(fanout):
                longer.append((*path, (used, tokens)))
                used += 1
        paths = longer
    return paths


def _windows(arrivals: Sequence[Arrival]) -> Make:
    """Each run takes a window of the trace, whose place is drawn."""

    def make(count: int, rng: np.random.Generator) -> list[Arrival]:
        taken = min(count, len(arrivals))
        begin = int(rng.integers(len(arrivals) - taken + 1))
        return list(arrivals[begin : begin + taken])

    return make
