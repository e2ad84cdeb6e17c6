// SPDX-License-Identifier: Apache-2.0
#include "planner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "compose_rules.h"
#include "emit.h"
#include "lpt.h"

namespace fi {
namespace {

// Reused between plans, so that a step allocates nothing once the sizes have been seen.
struct Scratch {
  CutTiles flat, composed;
  Composition composition;
  std::vector<WorkItem> items;
};

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check_lengths(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
                   std::span<const int32_t> kv_lens) {
  const auto str = [](int64_t v) { return std::to_string(v); };
  const int64_t requests = int64_t(kv_lens.size());
  if (int64_t(qo_indptr.size()) != requests + 1)
    fail("qo_indptr: expected " + str(requests + 1) + " entries, one more than kv_lens; got " +
         str(int64_t(qo_indptr.size())) + ".");
  if (requests > config.limits.max_requests)
    fail("kv_lens: expected at most max_requests = " + str(config.limits.max_requests) + " requests; got " +
         str(requests) + ". Raise max_requests at construction.");
  if (qo_indptr[0] < 0) fail("qo_indptr[0]: expected >= 0; got " + str(qo_indptr[0]) + ".");
  for (int64_t r = 0; r < requests; ++r) {
    if (qo_indptr[r + 1] < qo_indptr[r])
      fail("qo_indptr: expected a non-decreasing sequence; got " + str(qo_indptr[r]) + " then " +
           str(qo_indptr[r + 1]) + " at entry " + str(r + 1) + ".");
    if (kv_lens[r] < 0) fail("kv_lens[" + str(r) + "]: expected >= 0; got " + str(kv_lens[r]) + ".");
    if (kv_lens[r] > config.limits.max_kv_len)
      fail("kv_lens[" + str(r) + "]: expected at most max_kv_len = " + str(config.limits.max_kv_len) +
           "; got " + str(kv_lens[r]) + ". Raise max_kv_len at construction.");
  }
  const int64_t tokens = int64_t(qo_indptr[requests]) - qo_indptr[0];
  if (tokens > config.limits.max_tokens)
    fail("qo_indptr: expected at most max_tokens = " + str(config.limits.max_tokens) + " query tokens; got " +
         str(tokens) + ". Raise max_tokens at construction.");
}

// Cuts every request into query tiles, each with the KV range that its rows can see. Rows without any
// key keep an empty range: their neutral state has to be written all the same.
void make_tiles(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
                std::span<const int32_t> kv_lens, std::vector<Tile>& tiles) {
  tiles.clear();
  for (size_t r = 0; r < kv_lens.size(); ++r) {
    const int32_t q_len = qo_indptr[r + 1] - qo_indptr[r], rows = q_len * config.group;
    const int kind = query_tile(config, rows);
    for (int64_t q = 0; q < rows; q += tile_height(kind))
      tiles.push_back(make_tile(config, int32_t(r), q_len, kv_lens[r], kind, int32_t(q)));
  }
}

// The tiles of a composed step from those of the same step without sharing. Members have one tile each.
void compose_tiles(const PlannerConfig& config, const Composition& composition, const std::vector<Tile>& flat,
                   std::vector<Tile>& tiles) {
  tiles.clear();
  for (const Tile& t : flat) {
    const int32_t leaf = composition.leaf[size_t(t.request)];
    tiles.push_back(leaf < 0 ? t : own_tile(t, composition.nodes[size_t(leaf)].end));
  }
  for (size_t j = 0; j < composition.nodes.size(); ++j) {
    const KeptNode& n = composition.nodes[j];
    for (int32_t k = 0; k < n.num_tiles; ++k)
      tiles.push_back(node_tile(int32_t(j), n.begin, n.end, n.kind, n.tokens * config.group, k));
  }
}

// The cost of an item at which splitting stops, that of an item of a node which is cut, and the estimated
// time; -1 where budgets are not compared.
struct Choice {
  int64_t budget, node_budget, time;
};

Choice choose_budget(const PlannerConfig& config, int shift, const std::vector<Tile>& tiles,
                     bool many_tickets) {
  int64_t total = 0, nodes = 0, of_requests = 0;
  for (const Tile& t : tiles) {
    const int64_t cost = scale_cost(tile_cost(config, t.kind, t.kv_end - t.kv_begin), shift);
    total += cost;
    if (t.level == kNode)
      nodes += cost;
    else
      ++of_requests;
  }
  const int64_t ideal = ideal_budget(config, total, shift);
  Choice best{ideal, node_budget(config, ideal_budget(config, nodes, shift), of_requests), -1};
  if (many_tickets) return best;

  for (int candidate = 0; candidate < kNumCandidates; ++candidate) {
    const int64_t budget = candidate_budget(ideal, candidate);
    int32_t chunk[kNumTiles];
    for (int i = 0; i < kNumTiles; ++i) chunk[i] = chunk_tokens(config, i, budget);
    const auto share = [&](const Tile& t) {
      return estimate_share(config, t.level, t.kind, t.kv_end - t.kv_begin, chunk[t.kind], shift);
    };
    int64_t load = 0, largest = 0, counts = 0;
    for (const Tile& t : tiles) {
      const Share s = share(t);
      load += s.items * s.cost;
      largest = std::max(largest, s.cost);
    }
    for (const Tile& t : tiles) counts += count_items(share(t), largest);
    const int64_t time = estimate_time(config, load, largest, counts);
    if (is_better(time, best.time)) best = {budget, best.node_budget, time};
  }
  return best;
}

// Splits the tiles evenly under the budgets and returns what the plan would hold.
PlanCapacity split_tiles(const PlannerConfig& config, const Choice& choice, const Composition& composition,
                         CutTiles& cut) {
  PlanCapacity use{};
  int32_t chunk[kNumTiles], of_nodes[kNumTiles];
  for (int i = 0; i < kNumTiles; ++i) {
    chunk[i] = chunk_tokens(config, i, choice.budget);
    of_nodes[i] = chunk_tokens(config, i, choice.node_budget);
  }
  const auto split = [&](TileLevel level, int kind, int32_t length) {
    const bool node = level == kNode;
    return split_tile(config, level, length,
                      node ? node_chunk(length, chunk[kind], of_nodes[kind]) : chunk[kind]);
  };
  cut.path_chunks.clear();
  for (const KeptNode& n : composition.nodes) {
    const int32_t above = n.parent < 0 ? 0 : cut.path_chunks[size_t(n.parent)];
    cut.path_chunks.push_back(above + split(kNode, n.kind, n.end - n.begin).chunks);
  }
  cut.splits.resize(cut.tiles.size());
  int64_t items = 0, units = 0, parts = 0, rows = 0;
  for (size_t i = 0; i < cut.tiles.size(); ++i) {
    const Tile& t = cut.tiles[i];
    const Split s = cut.splits[i] = split(t.level, t.kind, t.kv_end - t.kv_begin);
    items += s.chunks;
    rows += int64_t(s.states) * t.q_rows;
    if (t.level == kNode) continue;
    units += s.states > 0;
    parts += s.states;
    if (t.level == kOwn) parts += cut.path_chunks[size_t(composition.leaf[size_t(t.request)])];
  }
  use.items = saturate32(items);
  use.units = saturate32(units);
  use.parts = saturate32(parts);
  use.partial_rows = saturate32(rows);
  return use;
}

bool fits(const PlanCapacity& use, const PlanCapacity& cap) {
  return use.items <= cap.items && use.units <= cap.units && use.parts <= cap.parts &&
         use.partial_rows <= cap.partial_rows;
}

}  // namespace

void make_plan(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
               std::span<const int32_t> kv_lens, const Forest& forest, std::span<uint8_t> buffer) {
  check_lengths(config, qo_indptr, kv_lens);
  if (!forest.nodes.empty()) check_forest(config, qo_indptr, kv_lens, forest);
  const PlanCapacity cap = plan_capacity(config);
  const PlanLayout layout = plan_layout(cap);
  if (int64_t(buffer.size()) < layout.total)
    fail("plan buffer: expected " + std::to_string(layout.total) + " bytes; got " +
         std::to_string(buffer.size()) + ".");

  thread_local Scratch scratch;
  Composition& composition = scratch.composition;
  CutTiles* cut = &scratch.flat;
  make_tiles(config, qo_indptr, kv_lens, cut->tiles);
  const int shift = cost_shift(config, cap);
  const bool many = has_many_tickets(config, int64_t(cut->tiles.size()));
  Choice choice = choose_budget(config, shift, cut->tiles, many);
  compose(config, qo_indptr, forest, composition);
  if (!composition.empty()) {
    compose_tiles(config, composition, cut->tiles, scratch.composed.tiles);
    const Choice composed = choose_budget(config, shift, scratch.composed.tiles, many);
    if (many || is_quicker(config, composed.time, choice.time, shift)) {
      cut = &scratch.composed;
      choice = composed;
    } else {
      composition.clear();
    }
  }
  PlanCapacity use = split_tiles(config, choice, composition, *cut);
  while (!fits(use, cap)) {
    // The step's budget alone may be enough.
    if (choice.node_budget >= choice.budget)
      choice.budget = choice.budget < kMaxBudget / 2 ? 2 * choice.budget : kMaxBudget;
    choice.node_budget = choice.budget;
    use = split_tiles(config, choice, composition, *cut);
  }

  const auto words = [&](int64_t offset) { return reinterpret_cast<int32_t*>(buffer.data() + offset); };
  auto* items = reinterpret_cast<WorkItem*>(buffer.data() + layout.items);
  const NodeCounts counts =
      emit(config, qo_indptr, forest, composition, *cut, scratch.items,
           {reinterpret_cast<MergeUnit*>(buffer.data() + layout.units), words(layout.parts),
            reinterpret_cast<PrefixNode*>(buffer.data() + layout.nodes), words(layout.node_tokens),
            words(layout.reports)});
  PlanHeader header{};
  sort_longest_first(config, scratch.items, items, int32_t(composition.nodes.size()), header);
  if (!kv_lens.empty()) std::memcpy(words(layout.kv_len_bounds), kv_lens.data(), kv_lens.size_bytes());
  if (config.planned_queues)
    assign_queues({items, scratch.items.size()}, config.num_kv_heads, config.num_ctas,
                  words(layout.queue_begin), words(layout.queue_entries));

  std::memset(buffer.data() + layout.counters, 0, size_t(cap.counters) * 4);

  header.magic = kPlanMagic;
  header.version = kPlanVersion;
  header.num_requests = int32_t(kv_lens.size());
  header.num_tokens = qo_indptr.back() - qo_indptr.front();
  header.num_items = use.items;
  header.num_units = use.units;
  header.num_parts = use.parts;
  header.num_partial_rows = use.partial_rows;
  header.chunk = chunk_tokens(config, 0, choice.budget);
  header.num_ctas = config.num_ctas;
  header.num_kv_heads = config.num_kv_heads;
  header.group = config.group;
  header.invariant_grid = config.invariant_grid;
  header.num_queues = config.planned_queues ? config.num_ctas : 0;
  header.max_kv_len = kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
  header.num_nodes = int32_t(composition.nodes.size());
  header.num_node_tokens = counts.tokens;
  header.num_reports = counts.reports;
  std::memcpy(buffer.data() + layout.header, &header, sizeof(header));
}

}  // namespace fi
