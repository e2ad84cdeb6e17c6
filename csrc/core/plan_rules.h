// SPDX-License-Identifier: Apache-2.0
// The arithmetic of planning, in integers only: one source for the host planner and the device planner, whose
// plans have equal bytes. Sums of these values do not depend on their order.
#pragma once
#include <bit>
#include <cstdint>

#include "host_device.h"
#include "planner.h"

namespace fi {

inline constexpr int64_t kMaxBudget = int64_t(1) << 62;
inline constexpr int32_t kMaxInt32 = 0x7fffffff;

enum TileLevel : uint8_t {
  kFlat,  // rows of a request that has no node: all of its keys
  kOwn,   // rows of a composed request: the keys behind its nodes
  kNode,  // rows of a prefix node
};

// Query rows of one request or node and the KV range that they can see; empty when they see no key.
struct Tile {
  int32_t request;  // or node
  int32_t q_begin;
  int32_t kv_begin;
  int32_t kv_end;
  uint8_t kind;  // index into kTileLog2
  uint16_t q_rows;
  TileLevel level;
};

// How a tile is cut: `chunks` items of `chunk_len` KV tokens, the last one shorter. `states` counts its
// partial states, 0 where its one item writes the output.
struct Split {
  int32_t chunk_len;
  int32_t chunks;
  uint32_t states;
};

FI_HOST_DEVICE uint32_t ceil_div32(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
FI_HOST_DEVICE_CALL int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

FI_HOST_DEVICE int32_t tile_height(int kind) { return kind == 0 ? 1 : 8 << kind; }

FI_HOST_DEVICE int tile_log2(int kind) { return kind == 0 ? 0 : 3 + kind; }

// Chunk borders are multiples of it.
FI_HOST_DEVICE uint32_t chunk_align(const PlannerConfig& c) {
  return uint32_t(c.invariant_grid > 0 ? c.invariant_grid : c.granule);
}

FI_HOST_DEVICE int bit_width(uint32_t v) {
#if defined(__CUDA_ARCH__)
  return 32 - __clz(int(v));
#else
  return std::bit_width(v);
#endif
}

// The least query tile that holds `packed_rows`, or the greatest one if none does.
FI_HOST_DEVICE int query_tile(const PlannerConfig& c, int64_t packed_rows) {
  const int32_t most = packed_rows < c.max_tile ? int32_t(packed_rows) : c.max_tile;
  const int32_t rows = most > c.min_tile ? most : c.min_tile;
  const int kind = bit_width(uint32_t(rows - 1)) - 3;  // without a loop: a device asks this at every turn
  return rows == 1 ? 0 : kind > 1 ? kind : 1;
}

// The tile that begins at packed row `q_begin` of a request.
FI_HOST_DEVICE Tile make_tile(const PlannerConfig& c, int32_t request, int32_t q_len, int32_t kv_len,
                              int kind, int32_t q_begin) {
  const int32_t left = q_len * c.group - q_begin, height = tile_height(kind);
  const int32_t q_rows = left < height ? left : height;
  const int32_t first = kv_len - q_len + q_begin / c.group;
  int32_t begin = 0, end = kv_len;
  if (c.causal) end = kv_len - q_len + (q_begin + q_rows - 1) / c.group + 1;
  if (c.window_left >= 0 && first > c.window_left) {
    const uint32_t align = chunk_align(c);
    begin = int32_t(uint32_t(first - c.window_left) / align * align);
  }
  if (end <= begin) begin = end = 0;
  return {request, q_begin, begin, end, uint8_t(kind), uint16_t(q_rows), kFlat};
}

// Costs are added up in units of 2^shift, so that no sum over a plan within the limits leaves 64 bits:
// `greatest` is the cost of a tile, `tickets` the capacity in (item, KV head).
FI_HOST_DEVICE int cost_shift(int64_t greatest, int64_t tickets, int32_t num_ctas) {
  int width = 7 - 62;  // the comparison in is_better() multiplies by up to 100
  for (uint64_t v = uint64_t(greatest); v; v >>= 1) ++width;
  for (uint64_t v = uint64_t(8 * tickets + 8 * int64_t(num_ctas)); v; v >>= 1) ++width;
  return width > 0 ? width : 0;
}

FI_HOST_DEVICE int64_t scale_cost(int64_t cost, int shift) {
  return (cost + (int64_t(1) << shift) - 1) >> shift;
}

FI_HOST_DEVICE int64_t tile_cost(const PlannerConfig& c, int kind, int32_t kv_tokens) {
  return int64_t(c.beta[kind]) * kv_tokens;
}

FI_HOST_DEVICE int64_t item_cost(const PlannerConfig& c, TileLevel level, int kind, int32_t kv_tokens,
                                 bool partial) {
  const int32_t state = level == kFlat ? c.part_cost : c.share_cost;
  return int64_t(c.alpha) * tile_height(kind) + tile_cost(c, kind, kv_tokens) + (partial ? state : 0);
}

FI_HOST_DEVICE int32_t saturate32(int64_t v) { return v < kMaxInt32 ? int32_t(v) : kMaxInt32; }

// Algorithm 1's share of a CTA, in the unit of item_cost(), from the scaled total of all tiles.
FI_HOST_DEVICE int64_t ideal_budget(const PlannerConfig& c, int64_t scaled_total, int shift) {
  int64_t ideal = ceil_div(scaled_total * c.num_kv_heads, c.num_ctas);
  if (ideal < 1) ideal = 1;
  return ideal > kMaxBudget >> shift ? kMaxBudget : ideal << shift;
}

// With so many tickets no other candidate can beat the ideal share.
FI_HOST_DEVICE bool has_many_tickets(const PlannerConfig& c, int64_t tiles) {
  return tiles * c.num_kv_heads >= int64_t(8) * c.num_ctas;
}

// Budgets that are compared, in sixteenths of the ideal share: a sixteenth more than that share first, since
// whole chunks of exactly the share are more than there are CTAs; a quarter more and twice as much, since in
// a small batch the way of a partial state costs more than an uneven share; and half of it, for large items
// that do not divide the CTAs leave a nearly empty last wave.
FI_HOST_DEVICE int64_t candidate_budget(int64_t ideal, int candidate) {
  const int64_t sixteenths = candidate == 0 ? 17 : candidate == 1 ? 20 : candidate == 2 ? 32 : 8;
  if (ideal > kMaxBudget / 32) return sixteenths < 16 ? ideal / 2 : kMaxBudget;
  return ceil_div(ideal * sixteenths, 16);
}

// KV tokens of one item of this tile kind when an item may cost `budget`.
FI_HOST_DEVICE int32_t chunk_tokens(const PlannerConfig& c, int kind, int64_t budget) {
  const int64_t align = chunk_align(c), enough = ceil_div(budget, c.beta[kind]);
  const int64_t tokens = enough < c.min_chunk ? c.min_chunk : enough;
  // Mostly a power of two: a device waits for a division.
  if (align & (align - 1)) return saturate32(ceil_div(tokens, align) * align);
  return saturate32((tokens + align - 1) & -align);
}

// What an item of a node may cost, unless the step's budget is less. ideal: ideal_budget() of the nodes'
// tiles alone. With the nodes' own share of the CTAs all CTAs read nodes first and requests afterwards, whose
// last items then fold few rows each, where the last item of a node would fold all rows of its tile. At least
// three times what its state costs.
FI_HOST_DEVICE int64_t node_share(const PlannerConfig& c, int64_t ideal) {
  const int64_t share = candidate_budget(ideal, 0), least = 3 * int64_t(c.share_cost);
  return share > least ? share : least;
}

// The same where the requests have `tiles`: where these are no more items than there are CTAs, more items of
// nodes would only make a second wave.
FI_HOST_DEVICE int64_t node_budget(const PlannerConfig& c, int64_t ideal, int64_t tiles) {
  return tiles * c.num_kv_heads > c.num_ctas ? node_share(c, ideal) : kMaxBudget;
}

// KV tokens of one item of a node of `length` tokens, by chunk_tokens() of the step's budget and of
// node_budget(): what the step's budget leaves whole stays whole.
FI_HOST_DEVICE int32_t node_chunk(int32_t length, int32_t chunk, int32_t of_nodes) {
  return length > chunk && of_nodes < chunk ? of_nodes : chunk;
}

FI_HOST_DEVICE uint32_t chunk_count(int32_t kv_tokens, int32_t chunk) {
  return kv_tokens <= chunk ? 1 : ceil_div32(uint32_t(kv_tokens), uint32_t(chunk));
}

// Items of a tile under a candidate budget, and the scaled cost of one of them.
struct Share {
  uint32_t items;
  int64_t cost;
};
FI_HOST_DEVICE Share estimate_share(const PlannerConfig& c, TileLevel level, int kind, int32_t kv_tokens,
                                    int32_t chunk, int shift) {
  const uint32_t n = chunk_count(kv_tokens, chunk);
  const int32_t each = n == 1 ? kv_tokens : int32_t(ceil_div32(uint32_t(kv_tokens), n));
  return {n, scale_cost(item_cost(c, level, kind, each, n > 1 || level != kFlat), shift)};
}

// Whether an item counts for the waves of large ones.
FI_HOST_DEVICE bool is_large(int64_t cost, int64_t largest) { return 4 * cost > 3 * largest; }

// Summed over tiles: all items in the upper half, those that are large in the lower one.
FI_HOST_DEVICE int64_t count_items(const Share& s, int64_t largest) {
  return int64_t(uint64_t(s.items) << 32) + (is_large(s.cost, largest) ? s.items : 0);
}

// Estimated makespan times 4 CTAs: the average load or the waves of large items, the last of which is full
// by chance only; waves count three quarters, since the CTAs that still read when others have ended read
// faster. An eighth of the largest item is added, for several CTAs do not run at one speed, where one of them
// has more than one item to be late with.
FI_HOST_DEVICE int64_t estimate_time(const PlannerConfig& c, int64_t load, int64_t largest, int64_t counts) {
  const int64_t items = int64_t(uint64_t(counts) >> 32), large = counts & 0xffffffff;
  const int64_t waves = ceil_div(large * c.num_kv_heads, c.num_ctas);
  const int64_t average = 4 * load * c.num_kv_heads, in_waves = largest * ((3 * waves + 1) * c.num_ctas);
  const int64_t bound = in_waves - in_waves / 4;
  const int64_t late = items * c.num_kv_heads <= c.num_ctas ? 0 : largest * (c.num_ctas - 1) >> 1;
  return (average > bound ? average : bound) + late;
}

// Another budget than the ideal one has to promise one percent.
FI_HOST_DEVICE bool is_better(int64_t time, int64_t best) { return best < 0 || time * 100 < best * 99; }

FI_HOST_DEVICE Split split_tile(const PlannerConfig& c, TileLevel level, int32_t kv_tokens, int32_t chunk) {
  const uint32_t n = chunk_count(kv_tokens, chunk);
  if (n == 1) return {kv_tokens, 1, level == kFlat ? 0u : 1u};
  const uint32_t align = chunk_align(c), len = uint32_t(kv_tokens), even = ceil_div32(len, n);
  // Mostly a power of two, as in chunk_tokens().
  const uint32_t each = align & (align - 1) ? ceil_div32(even, align) * align : (even + align - 1) & -align;
  const uint32_t chunks = ceil_div32(len, each);
  // Batch-invariant mode: the first item folds its grid chunks into one state, the others emit one each.
  const uint32_t states = c.invariant_grid > 0 ? 1 + ceil_div32(len - each, align) : chunks;
  return {int32_t(each), int32_t(chunks), states};
}

// States of the items before item `chunk` of a split tile.
FI_HOST_DEVICE uint32_t states_before(const PlannerConfig& c, const Split& s, int32_t chunk) {
  if (c.invariant_grid == 0 || chunk == 0) return uint32_t(chunk);
  return 1 + uint32_t(chunk - 1) * (uint32_t(s.chunk_len) / uint32_t(c.invariant_grid));
}

FI_HOST_DEVICE uint8_t item_flags(TileLevel level, bool first, bool last) {
  if (level == kNode) return kPrefix;
  const uint8_t begin = level == kOwn ? kSuffix : kFirstChunk;
  return uint8_t((first ? begin : 0) | (last ? kLastChunk : 0));
}

// Item `chunk` of a tile. unit: of the tile, or its report list. first_row: the first partial row of the
// tile's chunk 0; chunk_rows: how far apart the chunks of a node are, its packed rows.
FI_HOST_DEVICE WorkItem make_item(const PlannerConfig& c, const Tile& t, const Split& s, int32_t chunk,
                                  int32_t unit, int32_t first_row, int32_t chunk_rows = 0) {
  const bool last = chunk + 1 == s.chunks, split = s.chunks > 1 || t.level != kFlat;
  const int32_t begin = t.kv_begin + chunk * s.chunk_len, end = last ? t.kv_end : begin + s.chunk_len;
  const uint8_t flags = item_flags(t.level, chunk == 0, last);
  const int32_t step = t.level == kNode ? chunk_rows : t.q_rows;
  return {flags,
          uint8_t(tile_log2(t.kind)),
          t.q_rows,
          t.request,
          t.q_begin,
          begin,
          end,
          split ? first_row + int32_t(states_before(c, s, chunk)) * step : -1,
          split ? unit : -1,
          saturate32(item_cost(c, t.level, t.kind, end - begin, split))};
}

// Items are ordered by bucket, which tells apart 128 to 256 lengths up to the longest: what a finer order
// would gain in balance is below the error of the cost model, and one pass sorts.
inline constexpr int kSortBits = 8;
inline constexpr int kSortBuckets = 1 << kSortBits;

// Without the order of costs all items fall into one bucket, the last.
FI_HOST_DEVICE int sort_shift(const PlannerConfig& c, uint32_t greatest_cost) {
  const int width = bit_width(greatest_cost);
  if (!c.longest_first) return width;
  return width > kSortBits ? width - kSortBits : 0;
}

// Nodes' items are drawn before all others, whatever they cost: whoever draws a request's item late folds
// that request's rows only. They have the first bucket, and the two greatest costs of the others the second.
FI_HOST_DEVICE int sort_bucket(const PlannerConfig& c, const WorkItem& item, int shift) {
  if (c.longest_first && item.flags & kPrefix) return 0;
  const int cost = int(uint32_t(item.cost) >> shift);
  return kSortBuckets - 1 - (cost < kSortBuckets - 1 ? cost : kSortBuckets - 2);
}

// How items are drawn of a step of prefills and decoding requests. Those of the greatest tile are bound by
// arithmetic, all others by memory, and as a rule cheaper: by cost alone the memory would idle first and the
// arithmetic afterwards. Behind the first items, for two thirds of the CTAs, stand five eighths of the
// others, which the rest of the CTAs take; what is left of these comes last, and balances.
struct Overlap {
  int32_t first = 0, from = 0, moved = 0;  // items; none is moved where `moved` is 0

  // Where the item at `position` of the order of costs stands.
  FI_HOST_DEVICE int32_t place(int32_t position) const {
    if (position < first || position >= from + moved) return position;
    return position < from ? position + moved : position - (from - first);
  }
};

// tall: how many of the items have the greatest tile.
FI_HOST_DEVICE Overlap overlap(const PlannerConfig& c, int32_t num_nodes, int32_t items, int32_t tall) {
  const int32_t ctas = (c.num_ctas - c.num_ctas / 3) / c.num_kv_heads, first = ctas > 1 ? ctas : 1;
  if (!c.overlaps || !c.longest_first || c.planned_queues || num_nodes > 0 || tall <= first) return {};
  return {first, tall, int32_t(int64_t(items - tall) * 5 / 8)};
}

FI_HOST_DEVICE bool is_tall(const WorkItem& item) { return item.tile_log2 == tile_log2(kNumTiles - 1); }

// The first bucket whose items may be drawn for 2^log2 KV heads at once, kSortBuckets if there is none: these
// heads together cost at most half of what a CTA gets of the load, the cost of all items. Never the first,
// that of nodes; the second has two costs, both of which have to be low enough. Without nodes there is none:
// what memory bounds takes as long one after another, in tickets that are easier to balance.
FI_HOST_DEVICE int first_bundled_bucket(const PlannerConfig& c, int32_t num_nodes, int64_t load, int shift,
                                        int log2) {
  if (num_nodes == 0) return kSortBuckets;
  const int64_t limit = load * c.num_kv_heads / c.num_ctas >> (log2 + 1);
  const int64_t last = ((limit + 1) >> shift) - 1;  // of the buckets that lie below the limit, counted from 0
  if (last >= kSortBuckets - 2) return last >= kSortBuckets - 1 ? 1 : 2;
  return last < 0 ? kSortBuckets : kSortBuckets - 1 - int(last);
}

}  // namespace fi
