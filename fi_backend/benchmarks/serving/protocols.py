# SPDX-License-Identifier: Apache-2.0
"""How a completion is asked for over HTTP and how its stream is read, engine by engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """prompt: token ids. at: seconds after the start. samples: answers wanted, drawn at temperature 1.

    abort_after: tokens after which the client hangs up. prefix: (id, tokens) of the blocks with which the
    prompt begins; equal ids are equal tokens.
    """

    prompt: list[int]
    max_tokens: int
    at: float = 0.0
    samples: int = 1
    abort_after: int | None = None
    prefix: tuple[tuple[int, int], ...] = ()


@dataclass
class Outcome:
    """What came back; times are seconds after the moment at which the request was to be sent.

    sent: when it really was, or None if the run was stopped before. tokens: of sample 0. times: of every
    piece of the stream, for each sample. count: tokens of all samples. finished: all answers are complete.
    error: what went wrong, or None. stopped: when the run was ended before the answer. ended: samples that
    are complete. progress: tokens of each sample, for protocols that send totals.
    """

    samples: int = 1
    sent: float | None = None
    tokens: list[int] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    count: int = 0
    error: str | None = None
    stopped: float | None = None
    ended: int = 0
    progress: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.samples)]

    @property
    def finished(self) -> bool:
        """Whether the server said that every sample is complete."""
        return self.ended >= self.samples

    @property
    def first(self) -> float | None:
        """Time to the first token of any sample, or None."""
        return min((times[0] for times in self.times if times), default=None)

    def take(self, sample: int, tokens: list[int], now: float) -> None:
        """Record that a piece of `sample` with these new tokens arrived."""
        self.times[sample].append(now)
        self.count += len(tokens)
        if sample == 0:
            self.tokens += tokens


class Protocol(ABC):
    """path: of the interface. body(): what is posted. read(): take one event of the stream."""

    path: str

    @abstractmethod
    def body(self, model: str, request: Request) -> dict[str, Any]:
        """Return the JSON body that asks for exactly `request.max_tokens` tokens of each sample."""

    @abstractmethod
    def read(self, outcome: Outcome, event: Mapping[str, Any], now: float) -> None:
        """Record in `outcome` what the event says."""


class OpenAiCompletions(Protocol):
    """vLLM's completions, with token ids in both directions."""

    path = "/v1/completions"

    def body(self, model: str, request: Request) -> dict[str, Any]:
        """See Protocol."""
        sampling: dict[str, Any] = {"temperature": 0}
        if request.samples > 1:
            # Without a seed: vLLM draws for a seeded request row by row in Python, in every back end alike.
            sampling = {"temperature": 1.0, "n": request.samples}
        return {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **sampling,
        }

    def read(self, outcome: Outcome, event: Mapping[str, Any], now: float) -> None:
        """See Protocol."""
        if "error" in event:
            outcome.error = str(event["error"])[:300]
            return
        for choice in event.get("choices", ()):
            if tokens := choice.get("token_ids"):
                outcome.take(choice.get("index", 0), tokens, now)
            if reason := choice.get("finish_reason"):
                outcome.ended += 1
                if reason != "length":
                    outcome.error = f"the answer ended with {reason!r}, expected 'length'"


class SglangGenerate(Protocol):
    """SGLang's own interface, since its OpenAI-style one returns no token ids."""

    path = "/generate"

    def body(self, model: str, request: Request) -> dict[str, Any]:
        """See Protocol; the server knows its model."""
        del model
        sampling: dict[str, Any] = {"temperature": 0}
        if request.samples > 1:
            sampling = {"temperature": 1.0, "n": request.samples}
        return {
            "input_ids": request.prompt,
            "sampling_params": {"max_new_tokens": request.max_tokens, "ignore_eos": True, **sampling},
            "stream": True,
        }

    def read(self, outcome: Outcome, event: Mapping[str, Any], now: float) -> None:
        """See Protocol. Events count all tokens up to now; their ids are all or only the new ones."""
        if "error" in event:
            outcome.error = str(event["error"])[:300]
            return
        about, sample = event.get("meta_info", {}), int(event.get("index", 0))
        known, total = outcome.progress.get(sample, 0), int(about.get("completion_tokens", 0))
        new = total - known
        if new > 0:
            ids = event.get("output_ids") or []
            # The place of a token whose id the server keeps to itself still counts.
            outcome.take(sample, (ids[-new:] if ids else [-1] * new), now)
            outcome.progress[sample] = total
        if reason := about.get("finish_reason"):
            outcome.ended += 1
            kind = reason.get("type") if isinstance(reason, Mapping) else reason
            if kind != "length":
                outcome.error = f"the answer ended with {reason}, expected 'length'"
