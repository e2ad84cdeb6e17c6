# SPDX-License-Identifier: Apache-2.0
"""One batch as a small JSON file: what a step looked like to the planner, to be explained later."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from fi_backend.core.page_table import PageTable
    from fi_backend.core.spec import AttentionSpec

_Ints = npt.NDArray[np.int32]
_FORMAT = "fi_backend step 1"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """The lengths and index arrays of one batch, on the host.

    qo_indptr: int32 [requests + 1], first query token of each request. kv_lens: int32 [requests].
    block_table: one list of page ids a request, at least ceil(kv_len / page_size) long, or None.
    page_size, num_qo_heads, num_kv_heads, head_dim, causal, window_left, batch_invariant: as in
    AttentionSpec. num_ctas: what the plan was balanced over, or None. device: "cpu" or "cuda", whose costs it
    was planned with; tiles: least and greatest query tile of its kernels; None where they are not known.

    Raises ValueError or TypeError naming the field.
    """

    qo_indptr: _Ints
    kv_lens: _Ints
    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    causal: bool = True
    window_left: int = -1
    batch_invariant: bool = False
    num_ctas: int | None = None
    block_table: list[list[int]] | None = None
    device: str | None = None
    tiles: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "qo_indptr", _vector("qo_indptr", self.qo_indptr))
        object.__setattr__(self, "kv_lens", _vector("kv_lens", self.kv_lens))
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int):
            raise TypeError(f"page_size: expected an int; got {self.page_size!r}.")
        if self.page_size < 1:
            raise ValueError(f"page_size: expected >= 1; got {self.page_size}.")
        if self.page_size >= 2**31:
            raise ValueError(f"page_size: expected < 2^31; got {self.page_size}.")
        requests = self.kv_lens.size
        if self.qo_indptr.size != requests + 1:
            raise ValueError(
                f"qo_indptr: expected {requests + 1} entries, one more than kv_lens; "
                f"got {self.qo_indptr.size}."
            )
        if self.qo_indptr[0] != 0 or (np.diff(self.qo_indptr) < 0).any():
            raise ValueError(
                f"qo_indptr: expected a non-decreasing sequence from 0; got {self.qo_indptr.tolist()}."
            )
        if (self.kv_lens < 0).any():
            raise ValueError(f"kv_lens: expected >= 0; got {self.kv_lens.tolist()}.")
        if self.block_table is not None:
            self._check_block_table(self.block_table)
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda; got {self.device!r}.")
        if self.tiles is not None:
            if not isinstance(self.tiles, (list, tuple)) or [type(tile) for tile in self.tiles] != [int, int]:
                raise TypeError(f"tiles: expected the least and the greatest height; got {self.tiles!r}.")
            object.__setattr__(self, "tiles", tuple(self.tiles))  # JSON has lists alone

    def _check_block_table(self, table: list[list[int]]) -> None:
        if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
            raise TypeError("block_table: expected a list of lists of page ids, one a request.")
        if len(table) != self.kv_lens.size:
            raise ValueError(
                f"block_table: expected {self.kv_lens.size} rows, one a request; got {len(table)}."
            )
        for row, (pages, needed) in enumerate(zip(table, self.num_pages.tolist(), strict=True)):
            if len(pages) < needed:
                raise ValueError(
                    f"block_table[{row}]: expected at least {needed} pages of {self.page_size} tokens for "
                    f"kv_len {self.kv_lens[row]}; got {len(pages)}."
                )
            if any(not isinstance(page, int) or not 0 <= page < 2**31 for page in pages[:needed]):
                raise ValueError(
                    f"block_table[{row}]: expected page ids >= 0 and below 2^31; got {pages[:needed]}."
                )

    @property
    def num_pages(self) -> _Ints:
        """int32 [requests]: pages that hold a request's KV tokens, the last one perhaps in part."""
        return -(-self.kv_lens // self.page_size)

    @property
    def q_lens(self) -> _Ints:
        """int32 [requests]: query tokens of each request."""
        return np.diff(self.qo_indptr)

    @classmethod
    def capture(
        cls,
        spec: AttentionSpec,
        qo_indptr: Tensor,
        page_table: PageTable,
        *,
        num_ctas: int | None = None,
        device: str | None = None,
        tiles: tuple[int, int] | None = None,
    ) -> Step:
        """Copy what BatchAttention.plan() was given to the host; waits for the device if it lives on one.

        qo_indptr, page_table: the arguments of plan(). Contiguous KV has no block table. Requests at the end
        without queries and keys, with which engines fill a step up, are left out. num_ctas, device, tiles:
        see the class.
        """
        starts, kv_lens = (qo_indptr - qo_indptr[0]).cpu(), page_table.kv_lens.cpu()
        rows = _rows(page_table, kv_lens)
        used = int(((kv_lens != 0) | (starts.diff() != 0)).numpy().nonzero()[0].max(initial=-1)) + 1
        if rows is not None and spec.window_left >= 0:
            # Pages on the left of a window are never read; engines give them up.
            rows = [[max(page, 0) for page in row] for row in rows]
        return cls(
            qo_indptr=starts[: used + 1].numpy(),
            kv_lens=kv_lens[:used].numpy(),
            page_size=page_table.page_size,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            causal=spec.causal,
            window_left=spec.window_left,
            batch_invariant=spec.batch_invariant,
            num_ctas=num_ctas,
            block_table=None if rows is None else rows[:used],
            device=device,
            tiles=tiles,
        )


def _rows(table: PageTable, kv_lens: Tensor) -> list[list[int]] | None:
    from fi_backend.core.host_table import pages_on_host

    pages = pages_on_host(table, kv_lens)
    if pages is None:
        return None
    held = -((table.row_begin - table.row_end).cpu() // table.index_step)
    counts = (-(-kv_lens // table.page_size)).minimum(held).tolist()
    return [row[:count].tolist() for row, count in zip(pages, counts, strict=True)]


def save_step(path: Path | str, step: Step) -> None:
    """Write `step` to a JSON file."""
    document: dict[str, Any] = {"format": _FORMAT}
    for field in fields(Step):
        value = getattr(step, field.name)
        document[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
    Path(path).write_text(json.dumps(document) + "\n")


def load_step(path: Path | str) -> Step:
    """Read a step from a JSON file; raises ValueError or TypeError that names the file and the field."""
    try:
        document = json.loads(Path(path).read_text())
        if not isinstance(document, dict):
            raise TypeError(f"expected a JSON object; got {type(document).__name__}.")
        if (found := document.pop("format", _FORMAT)) != _FORMAT:
            raise ValueError(f"format: expected {_FORMAT!r}; got {found!r}.")
        known = {field.name for field in fields(Step)}
        required = {"qo_indptr", "kv_lens", "page_size", "num_qo_heads", "num_kv_heads"}
        if unknown := document.keys() - known:
            raise ValueError(f"{min(unknown)}: expected one of {', '.join(sorted(known))}.")
        if missing := required - document.keys():
            raise ValueError(f"{min(missing)}: expected a value; the file has none.")
        return Step(**document)
    except RecursionError:
        raise ValueError(f"{path}: expected a JSON object; got lists within lists without end.") from None
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from None


def _vector(name: str, values: Any) -> _Ints:
    wrong = TypeError(f"{name}: expected a vector of integers; got {values!r}.")
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise wrong from None
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise wrong
    if array.size and int(np.abs(array.astype(np.int64)).max()) >= 2**31:
        raise ValueError(f"{name}: expected 32-bit integers; got {array.tolist()}.")
    return array.astype(np.int32)
