# SPDX-License-Identifier: Apache-2.0
"""The code of docs/block_sparse.md runs as it stands and computes something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "block_sparse.md"


def test_the_page_runs() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        names.pop("out", None)
        exec(block, names)
        assert names["out"].isfinite().all()
        assert names["out"].abs().sum() > 0
