// SPDX-License-Identifier: Apache-2.0
// Which nodes of a prefix forest become levels of their own, and what their tiles look like: integers only,
// one source for the host planner and the device planner.
//
// A plan lists, before items are sorted: the tiles of the requests as without sharing (those of composed
// requests begin behind their nodes), then the tiles of the kept nodes in the forest's order. Items, merge
// units (split tiles and composed requests), their parts, partial rows and report lists are numbered in the
// order of these tiles.
#pragma once
#include "plan_rules.h"

namespace fi {

// A request can be a member of a node when its rows fill one query tile.
FI_HOST_DEVICE bool is_composable(const PlannerConfig& c, int32_t q_len) {
  return q_len >= 1 && int64_t(q_len) * c.group <= c.max_tile;
}

// KV tokens of a request that may be read together with others: whole pages before all of its queries.
FI_HOST_DEVICE int32_t shareable_tokens(const PlannerConfig& c, int32_t q_len, int32_t kv_len,
                                        int32_t page_size) {
  const int32_t computed = kv_len - q_len;
  return is_composable(c, q_len) && computed > 0 ? computed - computed % page_size : 0;
}

// What a member pays for each key that it reads alone.
FI_HOST_DEVICE int64_t member_key_cost(const PlannerConfig& c, int32_t q_len) {
  return c.beta[query_tile(c, int64_t(q_len) * c.group)];
}

// The query tiles of a node whose members have `tokens` query tokens. All have the same height.
FI_HOST_DEVICE int node_kind(const PlannerConfig& c, int32_t tokens) {
  return query_tile(c, int64_t(tokens) * c.group);
}
FI_HOST_DEVICE int32_t node_tile_count(const PlannerConfig& c, int32_t tokens, int kind) {
  return int32_t(uint32_t(tokens * c.group + tile_height(kind) - 1) >> tile_log2(kind));
}
FI_HOST_DEVICE int32_t node_tile_count(const PlannerConfig& c, int32_t tokens) {
  return node_tile_count(c, tokens, node_kind(c, tokens));
}

// Tiles of a node that hold a member's rows, first to last.
struct TileRange {
  int32_t first, last;
};
FI_HOST_DEVICE TileRange member_tiles(int kind, int32_t first_row, int32_t rows) {
  return {first_row >> tile_log2(kind), (first_row + rows - 1) >> tile_log2(kind)};
}

FI_HOST_DEVICE int64_t node_key_cost(const PlannerConfig& c, int32_t tokens) {
  return int64_t(node_tile_count(c, tokens)) * c.beta[node_kind(c, tokens)];
}

FI_HOST_DEVICE int64_t bounded_product(int64_t a, int64_t b) {  // both >= 0
  if ((a | b) <= kMaxInt32) return a * b;
  return a > 0 && b > kMaxBudget / a ? kMaxBudget : a * b;
}

// What a node costs beside its keys.
FI_HOST_DEVICE int64_t node_overhead(const PlannerConfig& c, int32_t tokens, int32_t members) {
  const int64_t tile = item_cost(c, kNode, node_kind(c, tokens), 0, true);
  return bounded_product(node_tile_count(c, tokens), tile) + int64_t(members) * c.share_cost;
}

// Keeping nodes is decided in two passes over the forest.
//   From the leaves up: below[n], the cost of a key of n that n itself does not read, begins as the sum of
//   member_key_cost() over all members. A node that pays by its own length takes below[n] - node_key_cost()
//   off below[parent], another one what its children took off. From the roots down: a node pays by its length
//   and that of the nodes just above it which are not kept, since it would read their keys as well. It has to
//   have fewer than max_levels kept nodes above it.
FI_HOST_DEVICE bool pays(int32_t length, int64_t below, int64_t key_cost, int64_t overhead) {
  const int64_t saved = below - key_cost;
  // The same without a division, which takes a device as long as all the rest; and without a condition before
  // what is mostly asked, for then a device loads one value after the other.
  if (saved > kMaxInt32) return saved > overhead / length;
  return (saved > 0) & (int64_t(uint64_t(saved) * uint64_t(length)) > overhead);
}

// Of the kept nodes, in order, those stay that come before a limit is exceeded: `nodes` counts them up to
// this one, `tokens` the query tokens of those among them that have no kept node above.
FI_HOST_DEVICE bool within_limits(const PlannerConfig& c, int64_t nodes, int64_t tokens) {
  return nodes <= c.sharing.max_nodes && tokens <= c.sharing.max_tokens;
}

// The rows of a request behind its nodes, which end at own_begin > 0.
FI_HOST_DEVICE Tile own_tile(Tile t, int32_t own_begin) {
  t.kv_begin = own_begin;
  t.level = kOwn;
  return t;
}

// Tile `number` of kept node `node`, whose keys are [begin, end) and whose packed rows are `rows`.
FI_HOST_DEVICE Tile node_tile(int32_t node, int32_t begin, int32_t end, int kind, int32_t rows,
                              int32_t number) {
  const int32_t q_begin = number << tile_log2(kind), left = rows - q_begin;
  const int32_t q_rows = left < tile_height(kind) ? left : tile_height(kind);
  return {node, q_begin, begin, end, uint8_t(kind), uint16_t(q_rows), kNode};
}

// Whether the composed plan is taken, by estimate_time() of the best budget of both. A step of many tickets
// (has_many_tickets() of the tiles without sharing) is not asked: its time is its load, which pays() has
// judged.
FI_HOST_DEVICE bool is_quicker(const PlannerConfig& c, int64_t composed, int64_t flat, int shift) {
  return is_better(composed + scale_cost(int64_t(4) * c.num_ctas * c.share_latency, shift), flat);
}

}  // namespace fi
