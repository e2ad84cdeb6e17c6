# SPDX-License-Identifier: Apache-2.0
"""The planner: cost model, capacities, and the calls that fill a plan buffer on the host or on a device."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fi_backend.core import jit
from fi_backend.core.jit.arch import cuda_arch, device_kind
from fi_backend.core.jit.ffi import tvm_ffi
from fi_backend.core.plan import PlanLayout
from fi_backend.core.sharing import SharingLimits, flat_reason
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from fi_backend.core.page_table import PageTable
    from fi_backend.core.prefix_forest import PrefixForest

    _Ints = Tensor | npt.NDArray[np.int32]
    _Bytes = Tensor | npt.NDArray[np.uint8]

MODULE = jit.ModuleSpec(
    name="planner",
    sources=(
        "core/planner.cc",
        "core/compose.cc",
        "core/emit.cc",
        "core/capacity.cc",
        "core/lpt.cc",
        "core/forest_host.cc",
        "bind/planner.cc",
        "bind/forest.cc",
    ),
)
_SIZES = 24
QUERY_TILES = (1, 16, 32, 64, 128)
MAX_SHARED_BETA = 2**20
"""The greatest cost of a key where prefixes are shared: kMaxSharedBeta of csrc/core/device_levels.h."""


@cache
def module() -> Any:
    """The planner's native module, built on first use."""
    return jit.load(MODULE)


def cuda_module(arch: str) -> jit.ModuleSpec:
    """The device planner for the target `arch`, such as "sm_90a"."""
    return jit.ModuleSpec(
        name="cuda_planner",
        sources=("cuda/planner.cu", "cuda/share_planner.cu", "core/capacity.cc", "bind/cuda_planner.cc"),
        arch=arch,
    )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Integer costs of a work item: ``alpha * Tq + beta[tile] * KV tokens`` (+ part_cost when it is split).

    beta: by query tile 1, 16, 32, 64, 128. granule: chunk borders are multiples of it (KV tokens).
    min_chunk: KV tokens below which a split does not pay. invariant_grid: chunk length of the
    batch-invariant mode. share_cost: instead of part_cost, of an item of a prefix node or of a request behind
    one. share_latency: what a composed step takes beside its work. overlap: of steps that prefill and decode,
    some workers read for decoding requests while the others compute. How the figures were fitted:
    docs/design/log.md.
    """

    granule: int = 64
    min_chunk: int = 256
    alpha: int = 1
    beta: tuple[int, int, int, int, int] = (4, 4, 5, 6, 8)
    part_cost: int = 64
    invariant_grid: int = 512
    share_cost: int = 16
    share_latency: int = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        if len(self.beta) != len(QUERY_TILES):
            raise ValueError(f"beta: expected {len(QUERY_TILES)} costs, one a query tile; got {self.beta!r}.")
        least_one = {name: getattr(self, name) for name in ("granule", "min_chunk", "invariant_grid")}
        least_one |= {f"beta[{i}]": value for i, value in enumerate(self.beta)}
        costs = {name: getattr(self, name) for name in ("alpha", "part_cost", "share_cost", "share_latency")}
        for name, value in {**least_one, **costs}.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int; got {value!r} of type {type(value).__name__}.")
            lower = int(name in least_one)
            if not lower <= value < 2**31:
                raise ValueError(f"{name}: expected {lower} .. 2**31 - 1; got {value}.")
        if not isinstance(self.overlap, bool):
            raise TypeError(f"overlap: expected a bool; got {self.overlap!r}.")

    @classmethod
    def for_device(cls, device: torch.device | str) -> CostModel:
        """The fitted model of a kind of device.

        On a CPU the arithmetic of a tile grows with its rows, while on a GPU tensor cores hide it behind the
        reads of the KV cache. A unit is 3.65 ns of a multiprocessor of an H200; share_latency is
        fitted to a grid of batches, of which a few are slower all the same (docs/design/log.md).
        """
        if device_kind(device) == "cpu":
            return cls(alpha=1, beta=(4, 5, 7, 11, 18), part_cost=256, share_cost=128)
        return cls(
            alpha=10, beta=(4, 4, 4, 5, 7), part_cost=1500, share_cost=1500, share_latency=8000, overlap=True
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may be asked for: requests and query tokens of one step, KV tokens of one request."""

    max_requests: int
    max_tokens: int
    max_kv_len: int

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_kv_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int; got {value!r} of type {type(value).__name__}.")
            if not 1 <= value < 2**31:
                raise ValueError(f"{name}: expected 1 .. 2**31 - 1; got {value}.")


class Planner:
    """Fills plan buffers for one spec under fixed limits, from lengths on the host or on a device.

    spec, limits: see there. num_ctas: CTAs (threads on a CPU) to balance over. planned_queues: also assign
    every item to a CTA by the paper's Algorithm 1. longest_first: False leaves the items in the order of the
    requests. costs: the cost model. tiles: least and greatest query tile height that the kernels have, of
    QUERY_TILES. sharing: capacity for shared prefixes (default: none). variant: the user's, which may ask for
    flat plans.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        *,
        num_ctas: int,
        costs: CostModel,
        planned_queues: bool = False,
        longest_first: bool = True,
        tiles: tuple[int, int] = (1, 128),
        sharing: SharingLimits | None = None,
        variant: AttentionVariant | None = None,
    ) -> None:
        if isinstance(num_ctas, bool) or not isinstance(num_ctas, int):
            raise TypeError(f"num_ctas: expected an int; got {num_ctas!r} of type {type(num_ctas).__name__}.")
        if not 1 <= num_ctas < 2**31:
            raise ValueError(f"num_ctas: expected 1 .. 2**31 - 1; got {num_ctas}.")
        if not (len(tiles) == 2 and set(tiles) <= set(QUERY_TILES) and tiles[0] <= tiles[1]):
            raise ValueError(
                f"tiles: expected the least and the greatest height of {QUERY_TILES}; got {tiles!r}."
            )
        self.limits = limits
        self.costs = costs
        self.sharing = None if flat_reason(spec, variant) else sharing
        if self.sharing and max(costs.beta) > MAX_SHARED_BETA:
            raise ValueError(
                f"costs.beta: expected at most {MAX_SHARED_BETA} with room for shared prefixes, where a "
                f"device adds costs up in 32 bits; got {costs.beta!r}. Scale all costs down."
            )
        config = np.array(
            [
                *astuple(limits),
                spec.num_kv_heads,
                spec.group_size,
                spec.causal,
                spec.window_left,
                costs.invariant_grid if spec.batch_invariant else 0,
                num_ctas,
                planned_queues,
                costs.granule,
                costs.min_chunk,
                costs.alpha,
                *costs.beta,
                costs.part_cost,
                *tiles,
                *(astuple(self.sharing) if self.sharing else (0, 0, 0)),
                costs.share_cost,
                costs.share_latency,
                longest_first,
                costs.overlap,
            ],
            dtype=np.int64,
        )
        native = module()
        self.config = tvm_ffi().from_dlpack(config)
        sizes = np.empty(_SIZES, dtype=np.int64)
        native.sizes(self.config, spec.head_dim_v, sizes)
        values = sizes.tolist()
        self.capacity: tuple[int, ...] = tuple(values[:11])
        self.layout = PlanLayout(*values[11:23])
        self.scratch_bytes: int = values[23]
        self._plan, self._plan_shared = native.plan, native.plan_shared
        self.tiles = tiles
        self._page_size = spec.page_size
        self._on_device: dict[torch.device, tuple[Any, Tensor, int]] = {}

    def plan(
        self, qo_indptr: _Ints, kv_lens: _Ints, buffer: _Bytes, forest: PrefixForest | None = None
    ) -> None:
        """Write the plan of one step.

        qo_indptr: host int32 [requests + 1]; kv_lens: host int32 [requests], exact or upper bounds;
            buffer: host uint8 [layout.total]. forest: what the requests share; nodes become levels of the
            plan where that pays and `sharing` has room, none where flat_reason() of the spec says so.
            Raises ValueError before anything is written when a limit is broken, or for a forest that does
            not fit the lengths.
        """
        if forest is None:
            self._plan(self.config, qo_indptr, kv_lens, buffer)
        else:
            nodes, members = forest.nodes, forest.members
            self._plan_shared(self.config, qo_indptr, kv_lens, nodes, members, self._page_size, buffer)

    def plan_on_device(
        self,
        qo_indptr: Tensor,
        kv_lens: Tensor,
        buffer: Tensor,
        table: PageTable | None = None,
        shareable: Tensor | None = None,
        tally: Tensor | None = None,
    ) -> None:
        """Queue the plan of one step on the current stream; the bytes are those of plan().

        qo_indptr: CUDA int32 [requests + 1]; kv_lens: CUDA int32 [requests]; buffer: CUDA uint8
            [layout.total], aligned to 16 bytes. All on one device. Never waits for it; a graph can capture
            the call after a prepare(). The host sees shapes only: lengths that break a limit give a plan
            without items and set bits of the buffer's faults (PlannerFault in csrc/core/plan.h). Raises
            ValueError for more requests than max_requests, and with planned_queues, which need host lengths.
        table: pages of the requests, in which shared prefixes are looked for, among the first 1024 requests;
            the plan is that of PrefixForest.from_page_table(). Needs room for sharing. shareable: CUDA int32
            [requests], at most so many KV tokens of each request are shared (default: all whole pages before
            its queries). tally: CUDA int64 [3], see ShareTally; a plan with shared prefixes adds to it.
        """
        self.prepare(kv_lens.device)
        native, workspace, ctas = self._on_device[kv_lens.device]
        if table is None or table.indices is None:
            native.plan_on_device(self.config, qo_indptr, kv_lens, workspace, buffer)
            return
        native.plan_shared_on_device(
            self.config,
            qo_indptr,
            kv_lens,
            table.indices,
            table.row_begin,
            table.row_end,
            table.index_step,
            table.page_size,
            shareable,
            tally,
            workspace,
            buffer,
            ctas,
        )

    def prepare(self, device: torch.device) -> None:
        """Do what the first plan_on_device() on `device` would begin with: compile, load, allocate.

        A stream that is being captured needs it to be done before. Raises BuildError, UnsupportedError.
        """
        if device not in self._on_device:
            import torch

            native = jit.load(cuda_module(cuda_arch(device)))
            there = torch.empty(0, device=device)
            words = native.prepare(self.config, there)
            ctas = native.prepare_shared(there) if self.sharing else 0
            self._on_device[device] = native, torch.empty(words, dtype=torch.int32, device=device), ctas
