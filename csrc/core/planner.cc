// SPDX-License-Identifier: Apache-2.0
#include "planner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "lpt.h"
#include "plan_rules.h"

namespace fi {
namespace {

// Reused between plans, so that a step allocates nothing once the sizes have been seen.
struct Scratch {
  std::vector<Tile> tiles;
  std::vector<Split> splits;
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

// The cost of an item at which splitting stops.
int64_t choose_budget(const PlannerConfig& config, int shift, const std::vector<Tile>& tiles) {
  int64_t total = 0;
  for (const Tile& t : tiles) total += scale_cost(tile_cost(config, t.kind, t.kv_end - t.kv_begin), shift);
  const int64_t ideal = ideal_budget(config, total, shift);
  if (has_many_tickets(config, int64_t(tiles.size()))) return ideal;

  int64_t best = ideal, best_time = -1;
  for (int candidate = 0; candidate < kNumCandidates; ++candidate) {
    const int64_t budget = candidate_budget(ideal, candidate);
    int32_t chunk[kNumTiles];
    for (int i = 0; i < kNumTiles; ++i) chunk[i] = chunk_tokens(config, i, budget);
    const auto share = [&](const Tile& t) {
      return estimate_share(config, t.kind, t.kv_end - t.kv_begin, chunk[t.kind], shift);
    };
    int64_t load = 0, largest = 0, large = 0;
    for (const Tile& t : tiles) {
      const Share s = share(t);
      load += s.items * s.cost;
      largest = std::max(largest, s.cost);
    }
    for (const Tile& t : tiles)
      if (const Share s = share(t); is_large(s.cost, largest)) large += s.items;
    const int64_t time = estimate_time(config, load, largest, large);
    if (is_better(time, best_time)) {
      best_time = time;
      best = budget;
    }
  }
  return best;
}

// Splits the tiles evenly under the budget and returns what the plan would hold.
PlanCapacity split_tiles(const PlannerConfig& config, int64_t budget, const std::vector<Tile>& tiles,
                         std::vector<Split>& splits) {
  PlanCapacity use{};
  int32_t chunk[kNumTiles];
  for (int i = 0; i < kNumTiles; ++i) chunk[i] = chunk_tokens(config, i, budget);
  splits.resize(tiles.size());
  int64_t items = 0, units = 0, parts = 0, rows = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tile& t = tiles[i];
    splits[i] = split_tile(config, t.kv_end - t.kv_begin, chunk[t.kind]);
    items += splits[i].chunks;
    units += splits[i].chunks > 1;
    parts += splits[i].states;
    rows += int64_t(splits[i].states) * t.q_rows;
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

// Items in (request, tile, chunk) order and the reduction map.
void emit(const PlannerConfig& config, const Scratch& scratch, std::vector<WorkItem>& items, MergeUnit* units,
          int32_t* parts) {
  items.clear();
  int32_t unit = 0, part = 0, row = 0;
  for (size_t i = 0; i < scratch.tiles.size(); ++i) {
    const Tile& t = scratch.tiles[i];
    const Split& s = scratch.splits[i];
    for (int32_t c = 0; c < s.chunks; ++c) items.push_back(make_item(config, t, s, c, unit, row));
    if (s.chunks == 1) continue;
    units[unit++] = {t.request, t.q_begin, t.q_rows, s.chunks, part, part + int32_t(s.states), -1, 0};
    for (uint32_t state = 0; state < s.states; ++state, row += t.q_rows) parts[part++] = row;
  }
}

}  // namespace

void make_plan(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
               std::span<const int32_t> kv_lens, std::span<uint8_t> buffer) {
  check_lengths(config, qo_indptr, kv_lens);
  const PlanCapacity cap = plan_capacity(config);
  const PlanLayout layout = plan_layout(cap);
  if (int64_t(buffer.size()) < layout.total)
    fail("plan buffer: expected " + std::to_string(layout.total) + " bytes; got " +
         std::to_string(buffer.size()) + ".");

  thread_local Scratch scratch;
  make_tiles(config, qo_indptr, kv_lens, scratch.tiles);
  int64_t budget = choose_budget(config, cost_shift(config, cap), scratch.tiles);
  PlanCapacity use = split_tiles(config, budget, scratch.tiles, scratch.splits);
  while (!fits(use, cap)) {
    budget = budget < kMaxBudget / 2 ? 2 * budget : kMaxBudget;
    use = split_tiles(config, budget, scratch.tiles, scratch.splits);
  }

  auto* items = reinterpret_cast<WorkItem*>(buffer.data() + layout.items);
  auto* units = reinterpret_cast<MergeUnit*>(buffer.data() + layout.units);
  auto* parts = reinterpret_cast<int32_t*>(buffer.data() + layout.parts);
  auto* bounds = reinterpret_cast<int32_t*>(buffer.data() + layout.kv_len_bounds);
  emit(config, scratch, scratch.items, units, parts);
  sort_longest_first(scratch.items, items);
  if (!kv_lens.empty()) std::memcpy(bounds, kv_lens.data(), kv_lens.size_bytes());
  if (config.planned_queues) {
    auto* begin = reinterpret_cast<int32_t*>(buffer.data() + layout.queue_begin);
    auto* entries = reinterpret_cast<int32_t*>(buffer.data() + layout.queue_entries);
    assign_queues({items, scratch.items.size()}, config.num_kv_heads, config.num_ctas, begin, entries);
  }

  std::memset(buffer.data() + layout.counters, 0, size_t(cap.counters) * 4);

  PlanHeader header{};
  header.magic = kPlanMagic;
  header.version = kPlanVersion;
  header.num_requests = int32_t(kv_lens.size());
  header.num_tokens = qo_indptr.back() - qo_indptr.front();
  header.num_items = use.items;
  header.num_units = use.units;
  header.num_parts = use.parts;
  header.num_partial_rows = use.partial_rows;
  header.chunk = chunk_tokens(config, 0, budget);
  header.num_ctas = config.num_ctas;
  header.num_kv_heads = config.num_kv_heads;
  header.group = config.group;
  header.invariant_grid = config.invariant_grid;
  header.num_queues = config.planned_queues ? config.num_ctas : 0;
  header.max_kv_len = kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
  std::memcpy(buffer.data() + layout.header, &header, sizeof(header));
}

}  // namespace fi
