// SPDX-License-Identifier: Apache-2.0
// A work item with the exact lengths of this launch, and the shared memory through which the warps agree.
#pragma once
#include "../core/params.h"
#include "choice.cuh"
#include "launch.h"
#include "marks.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "traits.cuh"

namespace fi::sm80 {

struct Work {
  int32_t item;  // -1: no more work
  int32_t request, kv_head;
  int32_t heads_log2;  // KV heads from kv_head on that the item holds side by side (a bundle)
  int32_t tile_log2;
  int32_t token_begin;       // first query token of the request
  int32_t q_begin, q_rows;   // packed rows; as many as exist
  int32_t first_pos;         // position of query token 0 of the request
  int32_t kv_begin, kv_end;  // where the first KV tile begins, and the exact end
  int32_t lo;                // first key that any row of the tile may see
  int32_t first, last;       // positions of the first and last row
  int32_t partial, unit;
  int32_t num_items, parts_begin, parts_end;  // of the merge unit
  int32_t planned_rows;                       // rows of one partial state, and where the item's states end
  int32_t partial_end;
  int32_t tokens;  // of an item of a prefix node, where its rows' tokens begin in the plan; otherwise -1
  int32_t levels;  // the rows belong to composed requests, whose units are folded together
  int32_t folds;   // one state for all grid chunks (batch-invariant mode)
  int32_t faults;  // KernelFault: the rows become NaN
  int64_t row_begin;
  int32_t tiles;        // KV tiles from kv_begin to kv_end, none without rows; of each head
  int32_t query_tiles;  // 1: the ring holds the queries in front of them
};

struct Control {
  uint64_t full[2][kMaxStages], empty[kMaxStages];
  uint64_t slot_full[kSlots], slot_empty[kSlots];
  uint64_t draw[kSlots];  // the producers are nearly through with the item
  uint64_t rows_full[kRowTiles], rows_empty[kRowTiles];
  int32_t arrived;
#if FI_MARKS
  int32_t marks[kMarkedWarps];
#endif
  int32_t place_arrived[kConsumerWarps];  // the same for the warps of a place, by the first of them
  Work slots[kSlots];
  float2 stats[kConsumerWarps][kStateRows];  // maximum and sum of the rows that warps combine
  uint64_t turned[kMaxStages];               // all warps have turned their keys of a tile (attend_turning())
  uint32_t turned_laps[kConsumerWarps];
};

// Walks round a ring of barriers, lap after lap.
template <int kSize>
struct Ring {
  int at = 0;
  uint32_t lap = 0;

  __device__ __forceinline__ uint32_t parity() const { return lap & 1; }

  __device__ __forceinline__ void advance() {
    if (++at == kSize) {
      at = 0;
      ++lap;
    }
  }

  __device__ __forceinline__ void advance(int steps) {
    at += steps;
    while (at >= kSize) {
      at -= kSize;
      ++lap;
    }
  }
};

// A consumer that takes every eighth tile may come to a stage whose tile of the lap before has not even
// arrived. One barrier could not tell the two apart, since it knows a phase by its parity alone, so laps
// alternate between two.
template <int kSize>
__device__ __forceinline__ uint32_t full_barrier(Control& control, const Ring<kSize>& ring) {
  return ptx::shared_address(&control.full[ring.lap & 1][ring.at]);
}

// A bundle gives each of its heads its own warps, which need all columns of their rows.
template <class Traits>
inline constexpr bool kBundles = !Traits::kInvariant && Traits::kColumnWarps == 1;

// A warp takes half of the keys of a tile where there are others for the rest, or one half after the other:
// its stage is free in half of the time, and the code of a step is half as long.
template <class Traits>
inline constexpr bool kHalves =
    Traits::kWgmma && !Traits::kInvariant && Traits::kColumnWarps == 1 && Traits::kKvTile == 64;

// Tiles that an item takes of the ring, beside its queries.
template <class Traits>
__device__ __forceinline__ int ring_tiles(const Work& w) {
  return kBundles<Traits> ? w.tiles << w.heads_log2 : w.tiles;
}

// Queries come through the ring, as one more tile in front of the item's keys, where they fit a stage. Those
// that fp8 keys multiply as they are have their columns permuted, which copies of 16 bytes do not.
template <class Traits>
inline constexpr bool kRingQueries = Traits::kQInRegisters && !Traits::kFp8 && !Variant::kTransformsQuery &&
                                     tile_bytes(kMaxQueryTile, Traits::kHeadDim * 2) <= Traits::kStageBytes;

// Rows of that tile: sixteen for each head of a bundle.
__device__ __forceinline__ int query_tile_rows(const Work& w) {
  return max(1 << w.tile_log2, 16) << w.heads_log2;
}

template <class Traits>
inline constexpr bool kComposes = kSharesPrefixes && !Traits::kInvariant;

// Query token of the rows [i * group, (i + 1) * group) of a node's item, or -1 where q does not have it.
__device__ __forceinline__ int node_token(const AttentionParams& p, const Work& w, int i) {
  const auto* tokens = reinterpret_cast<const int32_t*>(p.plan + p.layout.node_tokens);
  const int token = __ldg(tokens + w.tokens + i);
  return uint32_t(token) < uint32_t(p.num_tokens) ? token : -1;
}

// Where the query tokens of a request begin, and how many of them lie inside of the output, which must not be
// left whatever qo_indptr says.
struct QueryTokens {
  int begin, count;
  bool outside;
};
__device__ __forceinline__ QueryTokens query_tokens(const AttentionParams& p, int request) {
  const int begin = p.qo_indptr[request], end = p.qo_indptr[request + 1];
  const bool apart = begin < 0 || end < begin;
  return {begin, apart ? 0 : max(min(end, p.num_tokens) - begin, 0), apart || end > p.num_tokens};
}

// Whether the row of a request in the page table holds `kv_len` keys. No condition waits for another one, or
// a read would wait for the reads before it. Divides by nothing that takes a loop: the first item waits for
// it.
__device__ __forceinline__ bool holds(const LevelParams& level, const LaunchConstants& c, int64_t row_begin,
                                      int64_t row_end, int kv_len) {
  const int64_t last_page = c.page_size.divide(max(kv_len, 1) - 1);
  return bool(int(kv_len >= 0) & int(row_begin >= 0) & int(row_end >= row_begin) &
              int(row_end <= level.num_indices) &
              int(kv_len == 0 || last_page * level.index_step < row_end - row_begin));
}

template <class Traits>
__device__ __forceinline__ int brings_queries(const Work& w) {
  return kRingQueries<Traits> && w.tiles > 0;
}

// An item of a prefix node. Its range is exact: the keys lie before every row, so that rows are given
// positions from the last one on, where no mask meets them. Pages are looked up in the row of one member.
template <class Traits>
__device__ __forceinline__ void node_work(const AttentionParams& p, const LaunchConstants& c,
                                          const WorkItem& item, Work& w) {
  const PrefixNode node = reinterpret_cast<const PrefixNode*>(p.plan + p.layout.nodes)[item.request];
  const LevelParams& level = p.level;
  w.request = node.request;
  w.tokens = node.tokens_begin;
  w.levels = 1;
  w.token_begin = 0;
  w.num_items = w.parts_begin = w.parts_end = 0;
  w.row_begin = level.row_begin[node.request];
  const int kv_len = level.kv_lens[node.request];
  const bool held = holds(level, c, w.row_begin, level.row_end[node.request], kv_len);
  const bool legal = bool(int(held) & int(kv_len >= item.kv_end));
  w.faults = legal ? 0 : kFaultLengths;
  w.q_begin = item.q_begin;
  w.q_rows = min(int(item.q_rows), node.num_tokens * p.group - item.q_begin);
  w.first = w.last = item.kv_end - 1;
  w.first_pos = w.first - c.group.divide(item.q_begin);
  w.lo = w.kv_begin = item.kv_begin;
  w.kv_end = legal ? item.kv_end : item.kv_begin;
  w.partial_end = item.partial + item.q_rows;
  w.tiles = w.q_rows > 0 ? ceil_div(w.kv_end - w.kv_begin, Traits::kKvTile) : 0;
  w.query_tiles = brings_queries<Traits>(w);
}

// What is left of an item once the exact lengths are known. Lengths may differ from the planned ones: the
// first chunk reaches down to the true start of the window, the last one up to the true end.
template <class Traits>
__device__ __forceinline__ void exact_work(const AttentionParams& p, const LaunchConstants& c, int index,
                                           int kv_head, Work& w) {
  constexpr bool invariant = Traits::kInvariant;
  const WorkItem item = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items)[index];
  const LevelParams& level = p.level;
  w.item = index;
  w.request = item.request;
  w.kv_head = kv_head;
  w.heads_log2 = 0;
  w.tile_log2 = item.tile_log2;
  w.partial = item.partial;
  // A module that cannot share leaves such items alone: their rows are never written, and a fault says so.
  const bool foreign = !kComposes<Traits> && (item.flags & (kPrefix | kSuffix));
  w.unit = foreign ? -1 : item.unit;
  w.planned_rows = item.q_rows;
  w.folds = item.partial < 0 || (item.flags & kFirstChunk);
  if (kComposes<Traits> && (item.flags & kPrefix)) return node_work<Traits>(p, c, item, w);
  w.tokens = -1;
  w.levels = 0;
  w.faults = 0;
  const QueryTokens tokens = query_tokens(p, item.request);
  const int q_len = foreign ? 0 : tokens.count;
  w.token_begin = tokens.begin;
  const int64_t row_begin = level.row_begin[item.request], row_end = level.row_end[item.request];
  int kv_len = level.kv_lens[item.request];
  w.row_begin = row_begin;
  w.num_items = w.parts_begin = w.parts_end = 0;
  bool moved = false;
  if (w.unit >= 0) {
    const MergeUnit unit = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units)[w.unit];
    w.num_items = unit.num_items;
    w.parts_begin = unit.parts_begin;
    w.parts_end = unit.parts_end;
    if constexpr (kComposes<Traits>) {
      w.levels = unit.token >= 0;
      moved = unit.token >= 0 && unit.token != tokens.begin;
    }
  }
  const bool held = holds(level, c, row_begin, row_end, kv_len);
  // The nodes of a composed request have read keys [0, kv_begin), which all of its rows must see.
  if (kComposes<Traits> && (item.flags & kSuffix))
    moved = moved || kv_len < item.kv_begin || kv_len - item.kv_begin < q_len;
  if (!held || tokens.outside || (moved && q_len > 0) || foreign) {
    w.faults = kFaultLengths;
    kv_len = 0;
  }
  if constexpr (kPackedMask) {
    const int64_t bits = int64_t(q_len) * p.mask_heads * p.mask_kv_len[item.request];
    const int64_t begin = p.mask_begin[item.request];
    if (bits < 0 || begin < 0 || (bits + 7) / 8 > p.mask_bytes - begin) {
      w.faults = kFaultLengths;
      kv_len = 0;
    }
  }
  w.q_begin = item.q_begin;
  const int rows = q_len * p.group;
  w.q_rows = min(int(item.q_rows), rows - item.q_begin);
  w.first_pos = kv_len - q_len;
  w.first = w.first_pos + c.group.divide(item.q_begin);
  w.last = w.first_pos + c.group.divide(item.q_begin + max(w.q_rows, 1) - 1);
  const KeyRange first = Variant::visible_keys(p, w.first, kv_len);
  const int true_end = max(Variant::visible_keys(p, w.last, kv_len).end, 0);
  w.lo = first.begin;
  w.kv_begin = item.kv_begin;
  if (item.flags & kFirstChunk) w.kv_begin = min(w.kv_begin, w.lo / Traits::kKvTile * Traits::kKvTile);
  w.kv_end = min(item.kv_end, true_end);
  w.partial_end = item.partial + item.q_rows;
  if (invariant && !w.folds) {
    const int grid = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header)->invariant_grid;
    w.partial_end = item.partial + (item.kv_end - item.kv_begin + grid - 1) / grid * item.q_rows;
  }
  if (item.flags & kLastChunk) {
    // A later chunk of the invariant mode has as many partial states as were planned.
    if (invariant && !w.folds) {
      const int grid = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header)->invariant_grid;
      const int limit = item.kv_begin + (item.kv_end - item.kv_begin + grid - 1) / grid * grid;
      w.kv_end = min(true_end, limit);
      if (true_end > limit) w.faults |= kFaultLengths;
    } else {
      w.kv_end = true_end;
    }
  }
  w.tiles = w.q_rows > 0 && w.kv_end > w.kv_begin ? ceil_div(w.kv_end - w.kv_begin, Traits::kKvTile) : 0;
  w.query_tiles = brings_queries<Traits>(w);
}

// The tickets of a launch. Behind those of nodes, items are in the order of their costs: one of the last
// bundled[k - 1] makes one ticket for 2^k neighbouring KV heads, where the next number says nothing else.
// By a whole warp: lane k knows where those of 2^k heads begin.
struct Tickets {
  int from = 0, begin = 0;

  // Reads where they begin; returns how many there are.
  __device__ __forceinline__ int count(const AttentionParams& p, const PlanHeader& header) {
    begin = threadIdx.x % 32 == 0 ? 0 : INT32_MAX;
    int first = 0, tickets = 0;
#pragma unroll
    for (int k = 1; k <= kBundleSizes; ++k) {
      // Whole bundles alone, whatever the plan says.
      const bool whole = p.num_kv_heads % (1 << k) == 0;
      const int next =
          whole ? max(header.num_items - max(header.bundled[k - 1], 0), first) : header.num_items;
      tickets += (next - first) * p.num_kv_heads >> (k - 1);
      first = next;
      if (threadIdx.x % 32 == k) from = first, begin = tickets;
    }
    return tickets + ((header.num_items - first) * p.num_kv_heads >> kBundleSizes);
  }

  // Its item, first KV head and number of heads (logarithm).
  __device__ __forceinline__ void find(const AttentionParams& p, const LaunchConstants& c, int ticket,
                                       int& item, int& kv_head, int& heads_log2) const {
    heads_log2 = 31 - __clz(int(__ballot_sync(~0u, ticket >= begin)));
    const int rest = (ticket - __shfl_sync(~0u, begin, heads_log2)) << heads_log2;
    const int more = c.num_kv_heads.divide(rest);
    item = __shfl_sync(~0u, from, heads_log2) + more;
    kv_head = rest - more * p.num_kv_heads;
  }
};

// The heads (logarithm) of one ticket's 2^k that an item holds side by side: rows of one warp, whose result
// is folded alike by an item of any size.
template <class Traits>
__device__ __forceinline__ int bundled_heads(const Work& w, int heads_log2) {
  if constexpr (!kBundles<Traits>) return 0;
  const bool fits = w.tile_log2 <= 4 && w.tokens < 0 && (w.unit < 0 || w.levels);
  return fits ? heads_log2 : 0;
}

}  // namespace fi::sm80
