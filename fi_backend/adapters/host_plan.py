# SPDX-License-Identifier: Apache-2.0
"""Plans on the host what only the device knows: copied there, which waits for the device.

Only for FI_BACKEND_WITHOUT=device_plan; the plan is the one that the device would have made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.host_table import pages_on_host
from fi_backend.core.page_table import PageTable
from fi_backend.core.prefix_forest import PrefixForest

# Requests of a step that a device searches: kForestRequests of csrc/core/device_samples.h.
_SEARCHED = 1024


class HostLengths(NamedTuple):
    """Host copies of a step's query starts, int32 [requests + 1], and KV lengths, int32 [requests]."""

    qo_indptr: Tensor
    kv_lens: Tensor


def may_wait(tensor: Tensor) -> bool:
    """Return whether the host may wait for what `tensor` holds: not while its stream is being captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def copy_lengths(qo_indptr: Tensor, kv_lens: Tensor) -> HostLengths:
    """Copy the lengths of a step to the host."""
    return HostLengths(qo_indptr.cpu(), kv_lens.cpu())


def copy_forest(attention: BatchAttention, table: PageTable, lengths: HostLengths) -> PrefixForest | None:
    """Copy the pages of a step to the host and find there what its requests share, for `attention`."""
    pages = pages_on_host(table, lengths.kv_lens)
    if pages is None:
        return None
    limits = torch.full_like(lengths.kv_lens, torch.iinfo(torch.int32).max)
    limits[_SEARCHED:] = 0
    return PrefixForest.of_step(
        PageTable.from_block_table(pages, lengths.kv_lens, page_size=table.page_size),
        *lengths,
        group=attention.spec.group_size,
        max_tile=attention.planner.tiles[1],
        limits=limits,
    )
