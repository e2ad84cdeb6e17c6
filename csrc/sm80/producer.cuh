// SPDX-License-Identifier: Apache-2.0
// The warps that do not compute: one draws work items ahead of time, one reads the page table, the others
// gather scattered pages into contiguous, swizzled KV tiles. They run ahead across items, so that reading
// never pauses.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/wgmma.cuh"
#include "work.cuh"

namespace fi::sm80 {

// Tiles of an item that the producers still have to bring when the next item is drawn: late, because items
// are balanced by who is idle first, but early enough to hide three dependent reads.
inline constexpr int kDrawAhead = 9;
// Items of composed requests that have so few tiles altogether are drawn one after another: each takes longer
// to find than to read.
inline constexpr int kSmallTiles = 3;

// Brings the indices and the queries of an item into the L2 cache. While the memory is busy, a read that
// misses waits behind all KV tiles that are under way.
template <class Traits>
__device__ __forceinline__ void warm_cache(const AttentionParams& p, const LaunchConstants& c, const Work& w,
                                           int lane) {
  constexpr int kLine = 128, kMaxLines = 512;
  if (p.level.indices != nullptr && w.tiles > 0) {
    const int first = c.page_size.divide(max(w.kv_begin, w.lo)), last = c.page_size.divide(w.kv_end - 1);
    const char* begin =
        reinterpret_cast<const char*>(p.level.indices + w.row_begin + int64_t(first) * p.level.index_step);
    const int64_t bytes = int64_t(last - first) * p.level.index_step * 4;
    const int lines = int(min(bytes / kLine, int64_t(kMaxLines))) + 1;
    for (int i = lane; i < lines; i += 32) ptx::prefetch_l2(begin + min(int64_t(i) * kLine, bytes));
  }
  // Heads of a KV head lie side by side as a rule: one line of each row.
  const int rows = max(w.q_rows, 0), all_rows = kBundles<Traits> ? rows << w.heads_log2 : rows;
  for (int i = lane; i < all_rows; i += 32) {
    const int place = kBundles<Traits> && w.heads_log2 > 0 ? i / rows : 0;
    const int packed = w.q_begin + i - place * rows;
    int token = c.group.divide(packed);
    const int head = (w.kv_head + place) * p.group + packed - token * p.group;
    if (kComposes<Traits> && w.tokens >= 0) {
      token = node_token(p, w, token);
      if (token < 0) continue;
    }
    const char* q = static_cast<const char*>(p.q) +
                    2 * (int64_t(w.token_begin + token) * p.q_stride_token + int64_t(head) * p.q_stride_head);
    for (int at = 0; at < Traits::kHeadDim * 2; at += kLine) ptx::prefetch_l2(q + at);
  }
}

// Brings what the consumers will read of the plan to join levels: the units of a node's rows, or a unit's
// parts.
__device__ __forceinline__ void warm_units(const AttentionParams& p, const Work& w, int lane) {
  if (w.tokens < 0) {
    const auto* parts = reinterpret_cast<const int32_t*>(p.plan + p.layout.parts);
    if (w.parts_begin + lane < w.parts_end) ptx::prefetch_l2(parts + w.parts_begin + lane);
    return;
  }
  const auto* list = reinterpret_cast<const int32_t*>(p.plan + p.layout.reports) + w.unit;
  const auto* units = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units);
#pragma unroll 1
  for (int i = lane; i < list[0]; i += 32) ptx::prefetch_l2(units + list[1 + i]);
}

// Brings the plan's first lines and the lengths into the L2 cache, by threads that have nothing to do yet:
// the scheduler finds its way to the first key by reads that depend on each other.
__device__ __forceinline__ void warm_lengths(const AttentionParams& p, const LaunchConstants& c) {
  constexpr int kLine = 128;
  const int which = threadIdx.x / 64, line = threadIdx.x % 64;
  const int size = which < 2 ? 4 : 8;
  const void* array = which == 0   ? static_cast<const void*>(p.qo_indptr)
                      : which == 1 ? static_cast<const void*>(p.level.kv_lens)
                      : which == 2 ? static_cast<const void*>(p.level.row_begin)
                                   : static_cast<const void*>(p.level.row_end);
  if (line * kLine < p.num_requests * size) ptx::prefetch_l2(static_cast<const char*>(array) + line * kLine);
  if (line == 63 && which == 0) ptx::prefetch_l2(p.plan + p.layout.header);
  if (line == 63 && which == 1)
    ptx::prefetch_l2(p.plan + p.layout.items + int64_t(c.num_kv_heads.divide(blockIdx.x)) * sizeof(WorkItem));
}

// Draws items and works out their exact ranges.
template <class Traits>
__device__ __forceinline__ void schedule(const AttentionParams& p, const LaunchConstants& c,
                                         Control& control) {
  const int lane = threadIdx.x % 32;
  const auto* header = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header);
  const auto* queue = reinterpret_cast<const int32_t*>(p.plan + p.layout.queue_begin);
  const auto* entries = reinterpret_cast<const int32_t*>(p.plan + p.layout.queue_entries);
  const bool queued = header->num_queues > 0;
  // Code that runs once in a launch comes from far away: none that a plan without bundles does not need.
  const bool bundles = kBundles<Traits> && !queued && header->bundled[0] > 0;
  Tickets bundled;
  int tickets = header->num_items * p.num_kv_heads;
  if (bundles) tickets = bundled.count(p, *header);
  int next = int(blockIdx.x), end = tickets;  // of the tickets, or of this CTA's entries in its queue
  if (queued) {
    next = int(blockIdx.x) < header->num_queues ? queue[blockIdx.x] : 0;
    end = int(blockIdx.x) < header->num_queues ? queue[blockIdx.x + 1] : 0;
  }
  // The next ticket, `tickets` or more where there is none. As many draws as tickets, so that the last one
  // resets the counter.
  const auto draw = [&] {
    const int before = atomicAdd(p.counters + kTicket, 1);
    if (before == tickets - 1) p.counters[kTicket] = 0;
    return int(gridDim.x) + before;
  };
  Ring<kSlots> slot, oldest;  // oldest: the first item that the producers are not known to be nearly through
  int waiting = 0, tiles_ahead = 0;    // items from there on, and their tiles
  bool small = false;                  // the last item was
  int heads_left = 0, drawn_next = 0;  // of the ticket; the one behind it
  bool drawn = false, first = true;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_empty[slot.at]), slot.parity() ^ 1);
    Work& w = control.slots[slot.at];
    const auto pass = [&] {
      tiles_ahead -= ring_tiles<Traits>(control.slots[oldest.at]);
      --waiting;
      oldest.advance();
    };
    if (waiting == kSlots) pass();  // its slot is free again
    __syncwarp();
    if (heads_left == 0 && next >= end) {
      if (lane == 0) {
        w.item = -1;
        ptx::mbarrier_arrive(ptx::shared_address(&control.slot_full[slot.at]));
      }
      return;
    }
    const bool early = small && !queued && heads_left == 0;
    if (early && lane == 0) drawn_next = draw();
    if (heads_left == 0) {
      drawn = early;
      const int ticket = queued ? entries[next] : next;
      int item, kv_head, heads_log2 = 0;
      if (bundles) {
        bundled.find(p, c, ticket, item, kv_head, heads_log2);
      } else {
        item = c.num_kv_heads.divide(ticket);
        kv_head = ticket - item * p.num_kv_heads;
      }
      if (lane == 0) {
        exact_work<Traits>(p, c, item, kv_head, w);
        w.heads_log2 = bundled_heads<Traits>(w, heads_log2);
        // Consumers are idle before the first tile, and producers are not.
        if (first && 1 << w.tile_log2 < kMaxQueryTile) w.query_tiles = 0;
      }
      heads_left = 1 << heads_log2;
      first = false;
    } else if (lane == 0) {
      // The next head of a ticket whose item is not one to be bundled.
      const Work& before = control.slots[(slot.at + kSlots - 1) % kSlots];
      w = before;
      ++w.kv_head;
    }
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&control.slot_full[slot.at]));
    __syncwarp();
    FI_MARK(control, "drawn");
    heads_left = kBundles<Traits> ? heads_left - (1 << w.heads_log2) : 0;
    if (kComposes<Traits> && w.levels) warm_units(p, w, lane);
    warm_cache<Traits>(p, c, w, lane);
    small = kComposes<Traits> && w.levels && w.tiles < kSmallTiles;
    tiles_ahead += ring_tiles<Traits>(w);
    ++waiting;
    while (heads_left == 0 && waiting > 0 && (!small || tiles_ahead > kSmallTiles)) {
      ptx::mbarrier_wait(ptx::shared_address(&control.draw[oldest.at]), oldest.parity());
      pass();
    }
    if (heads_left > 0) {
      // The ticket is not done.
    } else if (queued) {
      ++next;
    } else {
      if (lane == 0 && !drawn) drawn_next = draw();
      next = __shfl_sync(~0u, drawn_next, 0);
    }
    slot.advance();
  }
}

// Reads the page table ahead of the producers: for every key of a tile its page, or where its row lies in
// units of 16 bytes from the first one; kNoRow where there is nothing to read. A page outside the cache is
// not read either and condemns the item.
template <class Traits, bool kIndexed>
__device__ __forceinline__ void guide(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                      uint32_t* rows) {
  const uint32_t page_step = uint32_t(c.k_page_bytes / 16), token_step = uint32_t(c.k_token_bytes / 16);
  constexpr int kBatch = kRowTiles / 2;  // tiles whose indices are read together
  constexpr int kKvTile = Traits::kKvTile, kHalves = kKvTile / 32;
  const int lane = threadIdx.x % 32;
  Ring<kSlots> slot;
  Ring<kRowTiles> ring;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_full[slot.at]), slot.parity());
    Work& w = control.slots[slot.at];
    if (w.item < 0) return;
    const int heads_log2 = kBundles<Traits> ? w.heads_log2 : 0;  // heads take turns, tile by tile
    const int tiles = ring_tiles<Traits>(w), lo = max(w.lo, w.kv_begin), hi = w.kv_end, kv_begin = w.kv_begin;
    const int32_t* indices = kIndexed ? p.level.indices + w.row_begin : nullptr;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += kBatch) {
      int32_t found[kBatch][kHalves];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int key = kv_begin + (tile + j >> heads_log2) * kKvTile + half * 32 + lane;
          const bool valid = key >= lo && key < hi;
          const int page = c.page_size.divide(valid ? key : lo);
          found[j][half] = valid ? page : -1;
          if (kIndexed && valid) {
            found[j][half] = __ldg(indices + int64_t(page) * p.level.index_step);
            if (found[j][half] < 0) found[j][half] = INT32_MAX;
          }
        }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (tile + j >= tiles) break;
        bool fault = false;
        uint32_t row[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          int64_t x = found[j][half];
          if (kIndexed && x >= 0) x = c.index_divisor.divide(int32_t(x));
          if (!kIndexed && x >= 0) x += w.row_begin;
          const int64_t last = p.level.num_pages - 1;
          const int key = kv_begin + (tile + j >> heads_log2) * kKvTile + half * 32 + lane;
          const uint32_t in_page = uint32_t(key - c.page_size.divide(key) * c.page_size.divisor);
          const bool inside = x < last || (x == last && int(in_page) < p.level.last_page_size);
          fault |= x >= 0 && !inside;
          row[half] = uint32_t(x);
          if (c.one_offset) row[half] = uint32_t(x) * page_step + in_page * token_step;
          if (x < 0 || !inside) row[half] = kNoRow;
        }
        if (fault) {
          atomicOr(&w.faults, kFaultPages);
          atomicOr(p.counters + kFaults, kFaultPages);
        }
        ptx::mbarrier_wait(ptx::shared_address(&control.rows_empty[ring.at]), ring.parity() ^ 1);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) rows[ring.at * kKvTile + half * 32 + lane] = row[half];
        ptx::mbarrier_arrive_warp(ptx::shared_address(&control.rows_full[ring.at]), lane);
        ring.advance();
      }
    }
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.slot_empty[slot.at]), lane);
    slot.advance();
  }
}

// A producer warp brings half of the rows of a tile; eight lanes copy a row.
template <class Traits>
struct Loader {
  static constexpr int kKvTile = Traits::kKvTile;
  static constexpr int kRows = kKvTile / kProducerWarps;  // 32 or 16
  static constexpr int kSteps = kRows / 4;                // a warp copies four rows at a time

  const AttentionParams& p;  // constant bank: strides and divisors cost no registers
  const LaunchConstants& c;
  const int lane, warp;
  const char *k, *v;  // this lane's chunk of the head's first row
  uint64_t policy;    // of the L2 cache: keys of few rows are read once, those of many by other items, too

  __device__ __forceinline__ Loader(const AttentionParams& p_, const LaunchConstants& c_, int warp_)
      : p(p_), c(c_), lane(threadIdx.x % 32), warp(warp_) {}

  __device__ __forceinline__ void begin(const Work& w, int place = 0) {
    k = static_cast<const char*>(p.k) + int64_t(w.kv_head + place) * c.k_head_bytes + lane % 8 * 16;
    v = static_cast<const char*>(p.v) + int64_t(w.kv_head + place) * c.v_head_bytes + lane % 8 * 16;
    policy = w.tile_log2 <= 4 && w.tokens < 0 ? ptx::read_once_policy() : ptx::normal_policy();
    // Else the compiler adds the caches' addresses once more for every row.
    asm volatile("" : "+l"(k), "+l"(v));
  }

  // What the guide says of the rows that this lane copies.
  __device__ __forceinline__ void read(const uint32_t* rows, uint32_t (&found)[kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) found[i] = rows[warp * kRows + i * 4 + lane / 8];
  }

  // Starts the copies of a tile that begins at key `first`. Rows that do not exist become zeros, since 0 *
  // NaN would be NaN in the product with V.
  template <bool kOneOffset>
  __device__ __forceinline__ void copy(const uint32_t (&found)[kSteps], int first, uint32_t k_tile,
                                       uint32_t v_tile) const {
    const uint32_t to = (warp * kRows + lane / 8) * kRowBytes + (((lane % 8) ^ (lane / 8)) << 4);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool exists = found[i] != kNoRow;
      const uint32_t bytes = exists ? 16 : 0, row = exists ? found[i] : 0;
      int64_t k_row, v_row;
      if constexpr (kOneOffset) {
        k_row = v_row = int64_t(uint64_t(row) * 16);
      } else {
        const int key = first + warp * kRows + i * 4 + lane / 8;
        const int in_page = exists ? key - c.page_size.divide(key) * c.page_size.divisor : 0;
        k_row = row * c.k_page_bytes + in_page * c.k_token_bytes;
        v_row = row * c.v_page_bytes + in_page * c.v_token_bytes;
      }
      // Rows 4 .. 7 of eight have the third bit of the swizzle set.
      const uint32_t at = (to ^ (i % 2 * 64)) + i * 4 * kRowBytes;
      copy_row<Traits::kKChunks>(k_tile + at, k + k_row, bytes);
      copy_row<Traits::kVChunks>(v_tile + at, v + v_row, bytes);
    }
  }

  // Starts the copies of a tile of packed query rows; those that do not exist become zeros.
  __device__ __forceinline__ void copy_queries(const Work& w, uint32_t tile) const {
    constexpr int kChunks = Traits::kHeadDim / 8;
    const int rows = query_tile_rows(w), mine = rows / kProducerWarps;
    const char* from =
        static_cast<const char*>(p.q) + 2 * int64_t(w.token_begin) * p.q_stride_token + lane % 8 * 16;
#pragma unroll 2
    for (int i = 0; i < mine / 4; ++i) {
      const int row = warp * mine + i * 4 + lane / 8;
      const int place = kBundles<Traits> && w.heads_log2 > 0 ? row / 16 : 0;
      const int packed = w.q_begin + row - place * 16;
      int token = c.group.divide(packed);
      const int head = (w.kv_head + place) * p.group + packed - token * p.group;
      bool exists = row - place * 16 < w.q_rows;
      if (kComposes<Traits> && w.tokens >= 0 && exists) {
        token = node_token(p, w, token);
        exists = token >= 0;
      }
      const char* q =
          exists ? from + 2 * (int64_t(token) * p.q_stride_token + int64_t(head) * p.q_stride_head) : from;
      const uint32_t to = tile + row * kRowBytes + (((lane ^ row) & 7) << 4);
#pragma unroll
      for (int s = 0; s < (kChunks + 7) / 8; ++s)
        if ((s + 1) * 8 <= kChunks || s * 8 + lane % 8 < kChunks)
          ptx::cp_async_16(to + s * rows * kRowBytes, q + s * kRowBytes, exists ? 16 : 0);
    }
  }

  template <int kChunks>
  __device__ __forceinline__ void copy_row(uint32_t to, const char* from, uint32_t bytes) const {
#pragma unroll
    for (int s = 0; s < (kChunks + 7) / 8; ++s)
      if ((s + 1) * 8 <= kChunks || s * 8 + lane % 8 < kChunks)
        ptx::cp_async_16(to + s * kKvTile * kRowBytes, from + s * kRowBytes, bytes, policy);
  }
};

template <class Traits>
__device__ __forceinline__ void produce(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                        const uint32_t* rows, uint32_t stages) {
  const int warp = threadIdx.x / 32 - kConsumerWarps, lane = threadIdx.x % 32;
  Loader<Traits> loader(p, c, warp);
  constexpr int kKvTile = Traits::kKvTile;
  Ring<kSlots> slot;
  Ring<kRowTiles> ring;
  Ring<Traits::kStages> stage;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_full[slot.at]), slot.parity());
    const Work& w = control.slots[slot.at];
    if (w.item < 0) return;
    const int heads_log2 = kBundles<Traits> ? w.heads_log2 : 0;
    const int tiles = ring_tiles<Traits>(w), kv_begin = w.kv_begin;
    loader.begin(w);
    const bool draws = warp == 0 && lane == 0;
    if (draws && tiles <= kDrawAhead) ptx::mbarrier_arrive(ptx::shared_address(&control.draw[slot.at]));
    if (kRingQueries<Traits> && w.query_tiles) {
      ptx::mbarrier_wait(ptx::shared_address(&control.empty[stage.at]), stage.parity() ^ 1);
      loader.copy_queries(w, stages + stage.at * Traits::kStageBytes);
      ptx::mbarrier_arrive_after_copies(full_barrier(control, stage));
      stage.advance();
    }
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      if (kBundles<Traits> && heads_log2 > 0) loader.begin(w, i & (1 << heads_log2) - 1);
      ptx::mbarrier_wait(ptx::shared_address(&control.rows_full[ring.at]), ring.parity());
      uint32_t found[Loader<Traits>::kSteps];
      if (i == 0) {
        FI_MARK(control, "rows of the first tile");
      }
      loader.read(rows + ring.at * kKvTile, found);
      ptx::mbarrier_arrive_warp(ptx::shared_address(&control.rows_empty[ring.at]), lane);
      ring.advance();
      ptx::mbarrier_wait(ptx::shared_address(&control.empty[stage.at]), stage.parity() ^ 1);
      const uint32_t k_tile = stages + stage.at * Traits::kStageBytes;
      if (c.one_offset)
        loader.template copy<true>(found, kv_begin + (i >> heads_log2) * kKvTile, k_tile,
                                   k_tile + Traits::kKBytes);
      else
        loader.template copy<false>(found, kv_begin + (i >> heads_log2) * kKvTile, k_tile,
                                    k_tile + Traits::kKBytes);
      ptx::mbarrier_arrive_after_copies(full_barrier(control, stage));
      stage.advance();
      if (draws && tiles - i - 1 == kDrawAhead)
        ptx::mbarrier_arrive(ptx::shared_address(&control.draw[slot.at]));
    }
    FI_MARK(control, "all tiles started");
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.slot_empty[slot.at]), lane);
    slot.advance();
  }
}

}  // namespace fi::sm80
