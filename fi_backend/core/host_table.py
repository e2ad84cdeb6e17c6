# SPDX-License-Identifier: Apache-2.0
"""The pages of a step's requests on the host, wherever the engine keeps its table and whatever its form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fi_backend.core.page_table import PageTable


def pages_on_host(table: PageTable, kv_lens: Tensor) -> Tensor | None:
    """Copy the pages of some requests' KV tokens to the host; None for contiguous KV.

    table: of torch tensors, on any device, which is waited for. kv_lens: host int32 [requests]. Returns int32
    [requests, pages of the longest]; what lies behind a request's pages is arbitrary. Nothing is read behind
    the end of a row: where a request has more pages than its row holds, the last one is repeated.
    """
    if table.indices is None:
        return None
    indices = table.indices
    # All that lies behind the first element: rows may have any stride.
    elements = int(indices.untyped_storage().nbytes() // indices.element_size() - indices.storage_offset())
    longest = max(int(kv_lens.max()), 0) if kv_lens.numel() and elements else 0
    columns = torch.arange(-(-longest // table.page_size), device=indices.device) * table.index_step
    last = (table.row_end - 1).clamp_(0, max(elements - 1, 0))
    at = torch.minimum(table.row_begin[:, None] + columns, last[:, None])
    pages = indices.as_strided((elements,), (1,))[at]
    if table.index_divisor > 1:
        pages = pages.div(table.index_divisor, rounding_mode="floor")
    return pages.cpu()
