// SPDX-License-Identifier: Apache-2.0
// The host planner: lengths in, plan bytes out. The same lengths give the same bytes.
#pragma once
#include <cstdint>
#include <span>

#include "forest.h"
#include "plan.h"

namespace fi {

inline constexpr int kNumTiles = 5;
inline constexpr int kTileLog2[kNumTiles] = {0, 4, 5, 6, 7};  // query tiles 1, 16, 32, 64, 128
inline constexpr int kMaxSplitsPerCta = 4;
inline constexpr int kNumCandidates = 4;  // budgets that are compared

// What the user states at construction; capacities follow from it.
struct PlannerLimits {
  int64_t max_requests;
  int64_t max_tokens;
  int64_t max_kv_len;
};

// What shared prefixes may take of a plan; all 0 without sharing. Nodes beyond are not shared.
struct SharingLimits {
  int64_t max_nodes;
  int64_t max_levels;  // nodes on the way from a root to a request
  int64_t max_tokens;  // query tokens of one step that are members of a node
};

struct PlannerConfig {
  PlannerLimits limits;
  int32_t num_kv_heads;
  int32_t group;
  int32_t causal;
  int32_t window_left;     // -1: off
  int32_t invariant_grid;  // > 0: chunk borders are multiples of it, counted from the request's start
  int32_t num_ctas;
  int32_t planned_queues;   // 1: also run Algorithm 1
  int32_t granule;          // chunk borders are multiples of it
  int32_t min_chunk;        // KV tokens below which a split does not pay
  int32_t alpha;            // cost = alpha * Tq + beta[tile] * KV tokens
  int32_t beta[kNumTiles];  // by query tile
  int32_t part_cost;        // writing and merging one partial state of a split tile
  int32_t min_tile;         // query tile heights that the kernels have, least and greatest
  int32_t max_tile;
  SharingLimits sharing;
  int32_t share_cost;     // the same of an item of a prefix node or of a composed request
  int32_t share_latency;  // what the states of nodes hold up a composed step
  int32_t longest_first;  // 0: items stand in the order of the requests, those of nodes behind them
  int32_t overlaps;       // 1: some CTAs read for short tiles while others compute tall ones
};

// Upper bounds of everything a plan within `config.limits` can contain; see capacity.cc for the proof.
PlanCapacity plan_capacity(const PlannerConfig& config);

// Query tiles that a plan within `config.limits` can have.
int64_t tile_capacity(const PlannerConfig& config);

// Query tiles of prefix nodes that a plan can have in addition.
int64_t node_tile_capacity(const PlannerConfig& config);

// Costs of a plan are added up in units of 2^cost_shift.
int cost_shift(const PlannerConfig& config, const PlanCapacity& capacity);

// What the requests of a step share; empty: nothing. Of the members only those that the nodes name are read.
struct Forest {
  std::span<const ForestNode> nodes;
  std::span<const int32_t> members;
  int32_t page_size = 1;
};

// Writes the plan. qo_indptr has one entry more than kv_lens; kv_lens may be upper bounds.
// Throws std::invalid_argument before anything is written when the input breaks a limit or the forest is
// none.
void make_plan(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
               std::span<const int32_t> kv_lens, const Forest& forest, std::span<uint8_t> buffer);

}  // namespace fi
