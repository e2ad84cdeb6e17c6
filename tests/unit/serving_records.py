# SPDX-License-Identifier: Apache-2.0
"""A serving record as `bench serve` writes it, with figures that nobody measured."""

from __future__ import annotations

from typing import Any

from fi_backend.benchmarks.serving.records import FORMAT

STEP = {"requests": 9, "kv_tokens": 900, "max_over_mean": 1.07}


def row(rate: float, ttft: float | None, *, ours: bool) -> dict[str, Any]:
    triple = [ttft, None if ttft is None else ttft * 0.8, None if ttft is None else ttft * 1.3]
    latencies = {f"p{percent}": triple for percent in (50, 90, 99)}
    return {
        "rate": rate,
        "runs": 3,
        "requests": 600,
        "errors": 0,
        "stopped_early": rate > 10,
        "ttft_ms": latencies,
        "itl_ms": latencies,
        "goodput_per_s": 0.97 * rate,
        "output_tokens_per_s": 200 * rate,
        "lag_ms": {"p50": 0.1, "p99": 0.4, "max": 2.0},
        "loop_lag_ms": None,
        "holds": rate < 10,
        "client_late": rate < 5,
        "fi": {"steps": 4} if ours else None,
        "kv_bytes": {"flat": 4e9 * rate, "saved": 3e9 * rate if ours else None},
        "balance": {"num_ctas": 132, "steps": [STEP] * 3},
    }


def record(**changes: Any) -> dict[str, Any]:
    backends = [
        {
            "name": name,
            "variables": {},
            "command": ["vllm", "serve", "<model>"],
            "ready_s": 31.5,
            "points": [row(rate, 40 * rate, ours=ours) for rate in (8, 4, 12)],
            "sustained": {"rate": 8.0, "failed": 12.0, "how": "grid"},
            "failed": None,
        }
        for name, ours in (("fi", True), ("A&B <x>", False))
    ]
    return {
        "format": FORMAT,
        "date": "2026-01-02T03:04:05+00:00",
        "host": "a host",
        "versions": {"vllm": "0"},
        "command": "fi-backend bench serve",
        "engine": "vllm",
        "model": "dummy:8b",
        "workload": "shared-prefix",
        "settings": {"seed": 0},
        "objectives": [{"metric": "ttft_ms", "percent": 99, "limit_ms": 200.0}],
        "backends": backends,
        **changes,
    }
