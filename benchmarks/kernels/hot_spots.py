# SPDX-License-Identifier: Apache-2.0
"""Reads the source page that Nsight Compute exported as CSV: stalls by region and by instruction."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path

REGION = 150
ALL_SAMPLES = "Warp Stall Sampling (All"


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--count", type=int, default=40, help="instructions to list")
    chosen = parser.parse_args()
    with chosen.csv.open(errors="replace") as stream:
        rows = list(csv.reader(stream))
    at = next((i for i, row in enumerate(rows) if "Source" in row), None)
    if at is None:
        raise SystemExit(
            f"csv: expected a source page with a column 'Source'; got {len(rows)} lines without."
        )
    head = rows[at]
    source = head.index("Source")
    samples = next(i for i, name in enumerate(head) if name.startswith(ALL_SAMPLES))
    stalls = [
        i for i, name in enumerate(head) if name.startswith("stall_") and "not issued" not in name.lower()
    ]
    body = [row for row in rows[at + 1 :] if len(row) == len(head)]

    def count(row: list[str], column: int) -> int:
        return int(row[column] or 0)

    def reasons(part: list[list[str]], most: int) -> str:
        sums = Counter({head[i].removeprefix("stall_"): sum(count(row, i) for row in part) for i in stalls})
        return ", ".join(f"{name} {number}" for name, number in sums.most_common(most) if number)

    total = sum(count(row, samples) for row in body)
    print(f"{len(body)} instructions, {total} samples: {reasons(body, 10)}")
    for begin in range(0, len(body), REGION):
        part = body[begin : begin + REGION]
        number = sum(count(row, samples) for row in part)
        if number * 200 >= total:
            print(f"{begin:>6} .. {number:>6} {100 * number / total:5.1f} %  {reasons(part, 4)}")
    hottest = sorted(range(len(body)), key=lambda i: -count(body[i], samples))[: chosen.count]
    for i in sorted(hottest):
        print(f"{i:>6} {count(body[i], samples):>6}  {body[i][source][:80]:<80}  {reasons([body[i]], 2)}")


if __name__ == "__main__":
    main()
