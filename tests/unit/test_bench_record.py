# SPDX-License-Identifier: Apache-2.0
"""What a record says of the machine it was made on."""

from __future__ import annotations

import sys

import pytest

from fi_backend.benchmarks.record import provenance, without_folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bench plan --json /root/out/plan.json --runs 3", "bench plan --json plan.json --runs 3"),
        ("--json=/var/x.json", "--json=x.json"),
        ("'alloc' at /opt/a-b/c.d/allocator.h:49: overflow", "'alloc' at allocator.h:49: overflow"),
        ("--json '/a b/x.json'", "--json '/a b/x.json'"),
        ("build/x.json, 7/8 and https://example.org/a/b", "build/x.json, 7/8 and https://example.org/a/b"),
        ("/", "/"),
    ],
)
def test_absolute_paths_become_names(text: str, expected: str) -> None:
    assert without_folders(text) == expected


def test_a_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/fi-backend", "bench", "--json", "/root/out/x.json"])
    assert provenance("here")["command"] == "fi-backend bench --json x.json"
