# SPDX-License-Identifier: Apache-2.0
"""What the options of `bench serve` mean."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fi_backend.cli.shell import InputError

if TYPE_CHECKING:
    from fi_backend.benchmarks.serving.summary import Objective

# Option, metric and percentile of each objective.
OBJECTIVES = (
    ("--slo-ttft-p99", "ttft_ms", 99),
    ("--slo-itl-p50", "itl_ms", 50),
    ("--slo-itl-p99", "itl_ms", 99),
)
_UNITS = {"ms": 1.0, "s": 1000.0}


def milliseconds(option: str, text: str) -> float:
    """Parse "200ms" or "0.2s"; InputError for anything else, also for a number without a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if match is None or float(match[1]) == 0:
        raise InputError(f"{option}: expected a duration such as 200ms or 0.2s; got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def objectives(texts: Sequence[str | None]) -> tuple[Objective, ...]:
    """Return the objectives of the options in OBJECTIVES, of which None were not given."""
    from fi_backend.benchmarks.serving.summary import Objective

    return tuple(
        Objective(metric, percent, milliseconds(option, text))
        for (option, metric, percent), text in zip(OBJECTIVES, texts, strict=True)
        if text is not None
    )


def rates(text: str) -> tuple[float, ...]:
    """Parse "4,8,12"; empty for none."""
    values = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(entry)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise InputError(
                f"--rates: expected numbers above 0 separated by commas; got {entry!r} in {text!r}"
            )
        if value in values:
            # The same requests once more, which the server has in its prefix cache by then.
            raise InputError(f"--rates: expected each rate once; got {entry} twice in {text!r}")
        values.append(value)
    return tuple(values)


def check_engine(engine: str, *, client: bool = True) -> None:
    """Raise InputError unless `engine` and, for the load generator, its library are installed here."""
    if engine not in ("vllm", "sglang"):
        raise InputError(f"--engine: expected vllm or sglang; got {engine!r}")
    needed = [(engine, f"'fi-backend[{engine}]'"), *([("aiohttp", "'fi-backend[bench]'")] if client else [])]
    for module, remedy in needed:
        if importlib.util.find_spec(module) is None:
            raise InputError(
                f"--engine: expected {module} in this environment; it is not installed. "
                f"Run pip install {remedy}"
            )


def runs_on_cpu(device: str) -> bool:
    """Return whether the engine is to run on the CPU; `auto` asks torch."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: expected auto, cpu or cuda; got {device!r}")
    if device != "auto":
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def device_ctas(cpu: bool) -> int:
    """Return how many workers share a step: cores of the CPU, multiprocessors of the GPU."""
    import torch

    if cpu or not torch.cuda.is_available():
        return os.cpu_count() or 1
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def output_folder(path: Path) -> Path:
    """Return the folder, made if need be; InputError where a run left something or it cannot be made."""
    # Requests and counters of a run that was killed before its record would be taken for those of this one.
    for name, meaning in (("record.json", "a record"), ("requests.jsonl", "requests"), ("stats", "counters")):
        if (path / name).exists():
            raise InputError(f"--out: expected a new or empty folder; {path} holds {meaning} already")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: expected a folder that can be made; got {path} ({error.strerror})"
        ) from error
    return path


def kv_element_bytes(arguments: Sequence[str]) -> int:
    """Return the bytes of one number in the KV cache, as far as the engine's arguments say."""
    text = " ".join(arguments)
    if re.search(r"--kv-cache-dtype[= ]fp8", text):
        return 1
    return 4 if re.search(r"--dtype[= ]float32", text) else 2
