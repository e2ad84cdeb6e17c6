// SPDX-License-Identifier: Apache-2.0
// The warps that do not compute: one draws work items ahead of time, the others gather scattered pages into
// contiguous, swizzled KV tiles. They run ahead across items, so that reading never pauses between two.
#pragma once
#include "../ptx/cp_async.cuh"
#include "work.cuh"

namespace fi::sm80 {

// Tiles of its item that the producers still have to bring when the next item is drawn: late, because items
// are balanced by who is idle first, but early enough to hide three dependent reads.
inline constexpr int kDrawAhead = 6;

// Draws items and works out their exact ranges.
__device__ __forceinline__ void schedule(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                         bool invariant) {
  const int lane = threadIdx.x % 32;
  const auto* header = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header);
  const auto* queue = reinterpret_cast<const int32_t*>(p.plan + p.layout.queue_begin);
  const auto* entries = reinterpret_cast<const int32_t*>(p.plan + p.layout.queue_entries);
  const bool queued = header->num_queues > 0;
  const int tickets = header->num_items * p.num_kv_heads;
  int next = blockIdx.x, end = tickets;  // of the tickets, or of this CTA's entries in its queue
  if (queued) {
    next = int(blockIdx.x) < header->num_queues ? queue[blockIdx.x] : 0;
    end = int(blockIdx.x) < header->num_queues ? queue[blockIdx.x + 1] : 0;
  }
  Ring<kSlots> slot;
  uint32_t draw_parity = 0;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_empty[slot.at]), slot.parity ^ 1);
    Work& w = control.slots[slot.at];
    if (next >= end) {
      if (lane == 0) {
        w.ticket = -1;
        ptx::mbarrier_arrive(ptx::shared_address(&control.slot_full[slot.at]));
      }
      return;
    }
    if (lane == 0) {
      w = exact_work(p, c, queued ? entries[next] : next, invariant);
      ptx::mbarrier_arrive(ptx::shared_address(&control.slot_full[slot.at]));
    }
    __syncwarp();
    if (lane == 0 && p.level.indices != nullptr && w.tiles() > 0) {
      const int page = c.page_size.divide(max(w.kv_begin, w.lo));
      const int32_t* index = p.level.indices + w.row_begin + int64_t(page) * p.level.index_step;
      asm volatile("prefetch.global.L1 [%0];" ::"l"(index));
    }
    ptx::mbarrier_wait(ptx::shared_address(&control.draw), draw_parity);
    draw_parity ^= 1;
    if (queued) {
      ++next;
    } else {
      if (lane == 0) {
        // One draw a ticket, so the draw that returns tickets - 1 is the launch's last: it resets the
        // counter.
        const int draws = atomicAdd(p.counters, 1);
        if (draws == tickets - 1) *p.counters = 0;
        next = int(gridDim.x) + draws;
      }
      next = __shfl_sync(~0u, next, 0);
    }
    slot.advance();
  }
}

// A producer warp brings 32 of the 64 rows of a tile, lane i knowing where row i lies; eight lanes copy a
// row.
template <class Traits, bool kIndexed>
struct Loader {
  static constexpr int kRows = kKvTile / kProducerWarps;

  const AttentionParams& p;  // constant bank: strides and divisors cost no registers
  const LaunchConstants& c;
  const int lane, warp;
  int64_t row_begin;
  int lo, hi;  // keys [lo, hi) may be read
  const char *k, *v;
  int32_t index, offset;  // of this lane's row of the next tile; offset -1: no such key

  __device__ __forceinline__ Loader(const AttentionParams& p_, const LaunchConstants& c_, int warp_)
      : p(p_), c(c_), lane(threadIdx.x % 32), warp(warp_) {}

  __device__ __forceinline__ void begin(const Work& w) {
    row_begin = w.row_begin;
    lo = w.lo;
    hi = w.kv_end;
    k = static_cast<const char*>(p.k) + int64_t(w.kv_head) * c.k_head_bytes;
    v = static_cast<const char*>(p.v) + int64_t(w.kv_head) * c.v_head_bytes;
  }

  // Reads the index of this lane's row in the tile that starts at key `first`; used as late as possible.
  __device__ __forceinline__ void look_up(int first) {
    const int key = first + warp * kRows + lane;
    const bool valid = key >= lo && key < hi;
    const int page = c.page_size.divide(valid ? key : lo);
    offset = valid ? key - page * c.page_size.divisor : -1;
    index = page;
    if (kIndexed && valid) index = __ldg(p.level.indices + row_begin + int64_t(page) * p.level.index_step);
  }

  // Starts the copies of the tile that was looked up. Rows that do not exist become zeros, since 0 * NaN
  // would be NaN in the product with V. Returns whether this lane's row lies on a page outside the cache,
  // which is not read and condemns the item.
  __device__ __forceinline__ bool copy(uint32_t k_tile, uint32_t v_tile) {
    int64_t page = index;
    if constexpr (kIndexed) {
      if (c.index_divisor.divisor != 1 && index >= 0) page = c.index_divisor.divide(index);
    } else {
      page += row_begin;
    }
    const int64_t last = p.level.num_pages - 1;
    const bool inside = page >= 0 && (page < last || (page == last && offset < p.level.last_page_size));
    const bool valid = offset >= 0 && inside;
    // Rows start at multiples of 16 bytes: the lowest bit is free to say that there is none.
    uint64_t k_row = valid ? uint64_t(k + page * c.k_page_bytes + int64_t(offset) * c.k_token_bytes) : 1u;
    uint64_t v_row = valid ? uint64_t(v + page * c.v_page_bytes + int64_t(offset) * c.v_token_bytes) : 1u;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = i * 4 + lane / 8, chunk = lane % 8;
      const uint64_t from_k = __shfl_sync(~0u, k_row, row), from_v = __shfl_sync(~0u, v_row, row);
      const bool exists = (from_k & 1) == 0;
      const uint32_t to = (warp * kRows + row) * kRowBytes + ((chunk ^ (row & 7)) << 4);
      copy_row<Traits::kKChunks>(k_tile + to, exists ? from_k : uint64_t(p.k), chunk, exists);
      copy_row<Traits::kVChunks>(v_tile + to, exists ? from_v : uint64_t(p.v), chunk, exists);
    }
    return offset >= 0 && !inside;
  }

  template <int kChunks>
  __device__ __forceinline__ void copy_row(uint32_t to, uint64_t from, int chunk, bool exists) const {
    const char* source = reinterpret_cast<const char*>(from) + (exists ? chunk * 16 : 0);
#pragma unroll
    for (int s = 0; s < (kChunks + 7) / 8; ++s)
      if ((s + 1) * 8 <= kChunks || s * 8 + chunk < kChunks)
        ptx::cp_async_16(to + s * kKvTile * kRowBytes, source + (exists ? s * kRowBytes : 0),
                         exists ? 16 : 0);
  }
};

template <class Traits, bool kIndexed>
__device__ __forceinline__ void produce(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                        uint32_t stages) {
  const int warp = threadIdx.x / 32 - kConsumerWarps, lane = threadIdx.x % 32;
  Loader<Traits, kIndexed> loader(p, c, warp);
  Ring<kSlots> slot;
  Ring<Traits::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_full[slot.at]), slot.parity);
    Work& w = control.slots[slot.at];
    if (w.ticket < 0) return;
    const int tiles = w.tiles(), kv_begin = w.kv_begin;
    loader.begin(w);
    if (tiles > 0) loader.look_up(kv_begin);
    const bool draws = warp == 0 && lane == 0;
    if (draws && tiles <= kDrawAhead) ptx::mbarrier_arrive(ptx::shared_address(&control.draw));
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      ptx::mbarrier_wait(ptx::shared_address(&control.empty[stage.at]), stage.parity ^ 1);
      const uint32_t k_tile = stages + stage.at * Traits::kStageBytes;
      if (loader.copy(k_tile, k_tile + Traits::kKBytes)) {
        atomicOr(&w.faults, kFaultPages);
        __threadfence_block();
      }
      ptx::mbarrier_arrive_after_copies(ptx::shared_address(&control.full[stage.at]));
      loader.look_up(kv_begin + (i + 1) * kKvTile);
      stage.advance();
      if (draws && tiles - i - 1 == kDrawAhead) ptx::mbarrier_arrive(ptx::shared_address(&control.draw));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.slot_empty[slot.at]));
    slot.advance();
  }
}

}  // namespace fi::sm80
