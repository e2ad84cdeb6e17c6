// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "plan_rules.h"

namespace fi {
namespace {

// Rows of a partial state, on average, that the scratch memory has room for.
constexpr int64_t kPartialRows = 64;

// Chunks of nodes above a composed request, on average and beyond one a node, that the parts have room for.
constexpr int64_t kNodeChunks = 16;

}  // namespace

// With tiles of up to H rows a request of n packed rows has one tile when n <= H and at most n / H + 1
// otherwise, so there are at most R + T * group / H tiles. With budget >= total * heads / (4 * CTAs) the sum
// of cost / budget is at most S = 4 * CTAs / heads; a tile has at most cost / budget + 1 items, a split one
// more than budget of cost, so at most S splits, 2 S parts. make_plan() doubles the budget while a count is
// over: with an unlimited budget there are no partials at all, so that it always ends inside these bounds.
//
// Sharing: C requests of together at most T_s query tokens are members of at most N nodes, L of them above
// each other. A node of n rows has at most n / H + 1 tiles, so that all have at most N + L * T_s * group / H.
// Node tiles are split by the same budget, or, as long as no count is over, by one of at least their own
// total * heads / CTAs, of which there are at most CTAs / heads. A composed request has a unit, and at least
// one part of its own and one of each of its nodes; these and their rows, (L + 1) * C and
// (L + 1) * T_s * group, are what an unlimited budget leaves. A tile's report list has its length, the
// members that begin in it, and one that began before.
PlanCapacity plan_capacity(const PlannerConfig& config) {
  const auto expect_int32 = [&](int64_t count) {
    if (count > std::numeric_limits<int32_t>::max())
      throw std::invalid_argument(
          std::string("max_requests, max_tokens") + (config.sharing.max_nodes > 0 ? ", sharing" : "") +
          ": expected a plan of fewer than 2^31 entries; got " + std::to_string(count) + ".");
  };
  const int64_t rows = config.limits.max_tokens * config.group;
  const int64_t node_tokens = config.sharing.max_levels * config.sharing.max_tokens;
  expect_int32(rows);
  expect_int32(node_tokens);  // so that no product below leaves 64 bits
  const int64_t tiles = tile_capacity(config);
  const int64_t splits = ceil_div(int64_t(kMaxSplitsPerCta) * config.num_ctas, config.num_kv_heads);
  const int64_t states = (config.invariant_grid > 0 ? 8 : 2) * splits;
  const SharingLimits& share = config.sharing;
  const int64_t members = std::min(config.limits.max_requests, share.max_tokens);
  const int64_t memberships = share.max_levels * members;
  const int64_t node_tiles = node_tile_capacity(config);
  const int64_t reports = 2 * node_tiles + memberships;
  const int64_t parts = states + memberships + members + kNodeChunks * members;
  const int64_t units = std::min(tiles, splits) + members;
  // Tall tiles are split seldom; where they are, the budget doubles until their rows fit.
  const int64_t height = std::min<int64_t>({config.max_tile, rows, kPartialRows});
  const int64_t partial_rows = states * height + (node_tokens + share.max_tokens) * config.group;
  const int64_t items = tiles + node_tiles + splits;
  const int64_t tickets = items * config.num_kv_heads;
  const int64_t entries = config.planned_queues ? tickets : 0;
  const int64_t counters = kArrivals + units * config.num_kv_heads;
  for (int64_t count : {tickets, parts, partial_rows, counters, config.limits.max_requests,
                        config.sharing.max_nodes, reports})
    expect_int32(count);
  return {int32_t(config.limits.max_requests),
          int32_t(items),
          int32_t(units),
          int32_t(parts),
          int32_t(partial_rows),
          config.planned_queues ? config.num_ctas : 0,
          int32_t(entries),
          int32_t(config.sharing.max_nodes),
          int32_t(node_tokens),
          int32_t(reports),
          int32_t(counters)};
}

int64_t tile_capacity(const PlannerConfig& config) {
  const int64_t rows = config.limits.max_tokens * config.group;
  return std::min(config.limits.max_requests + rows / config.max_tile, rows);
}

int64_t node_tile_capacity(const PlannerConfig& config) {
  const SharingLimits& share = config.sharing;
  return share.max_nodes + share.max_levels * share.max_tokens * config.group / config.max_tile;
}

int cost_shift(const PlannerConfig& config, const PlanCapacity& capacity) {
  const int64_t beta = *std::max_element(std::begin(config.beta), std::end(config.beta));
  const int64_t greatest = beta * config.limits.max_kv_len + int64_t(config.alpha) * kMaxQueryTile +
                           std::max(config.part_cost, config.share_cost);
  return cost_shift(greatest, int64_t(capacity.items) * config.num_kv_heads, config.num_ctas);
}

}  // namespace fi
