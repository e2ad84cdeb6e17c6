// SPDX-License-Identifier: Apache-2.0
#include "planner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "lpt.h"

namespace fi {
namespace {

struct Tile {
  int32_t request;
  int32_t q_begin;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t chunks;     // grid chunks of the invariant mode, work items otherwise
  int32_t chunk_len;  // KV tokens of one item
  uint8_t tile;
  uint8_t q_rows;
};

// Reused between plans, so that a step allocates nothing once the sizes have been seen.
struct Scratch {
  std::vector<Tile> tiles;
  std::vector<WorkItem> items;
  std::vector<SortKey> keys, spare;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
  const int64_t align = config.invariant_grid > 0 ? config.invariant_grid : config.granule;
  for (size_t r = 0; r < kv_lens.size(); ++r) {
    const int64_t q_len = int64_t(qo_indptr[r + 1]) - qo_indptr[r];
    const int64_t kv_len = kv_lens[r];
    const int64_t rows = q_len * config.group;
    const int tile = query_tile(rows);
    const int64_t height = int64_t(1) << kTileLog2[tile];
    for (int64_t q = 0; q < rows; q += height) {
      const int64_t q_rows = std::min(height, rows - q);
      const int64_t first = kv_len - q_len + q / config.group;
      const int64_t last = kv_len - q_len + (q + q_rows - 1) / config.group;
      int64_t end = config.causal ? std::min(kv_len, last + 1) : kv_len;
      int64_t begin =
          config.window_left >= 0 ? std::max<int64_t>(0, first - config.window_left) / align * align : 0;
      if (end <= begin) begin = end = 0;
      tiles.push_back({int32_t(r), int32_t(q), int32_t(begin), int32_t(end), 1, int32_t(end - begin),
                       uint8_t(tile), uint8_t(q_rows)});
    }
  }
}

int64_t tile_cost(const PlannerConfig& config, const Tile& t) {
  return int64_t(config.beta[t.tile]) * (t.kv_end - t.kv_begin);
}

// KV tokens of one item of this tile kind when an item may cost `budget`.
int64_t chunk_tokens(const PlannerConfig& config, int tile, int64_t budget) {
  const int64_t align = config.invariant_grid > 0 ? config.invariant_grid : config.granule;
  const int64_t tokens = std::max<int64_t>(config.min_chunk, ceil_div(budget, config.beta[tile]));
  return ceil_div(tokens, align) * align;
}

// Estimated makespan of an item budget: the average load, or the waves that the large items need, plus
// what writing and merging partial states adds. Candidates are the ideal share of Algorithm 1 and its
// fractions, for equal requests that do not divide the CTAs leave a nearly empty last wave.
int64_t choose_budget(const PlannerConfig& config, const std::vector<Tile>& tiles) {
  int64_t total = 0;
  for (const Tile& t : tiles) total += tile_cost(config, t);
  const int64_t ideal = std::max<int64_t>(1, ceil_div(total * config.num_kv_heads, config.num_ctas));
  const int64_t units = int64_t(tiles.size()) * config.num_kv_heads;
  if (units >= int64_t(8) * config.num_ctas) return ideal;

  int64_t best = ideal;
  double best_time = std::numeric_limits<double>::infinity();
  for (int parts = 1; parts <= kMaxSplitsPerCta; ++parts) {
    const int64_t budget = ceil_div(ideal, parts);
    int64_t tokens[kNumTiles];
    for (int i = 0; i < kNumTiles; ++i) tokens[i] = chunk_tokens(config, i, budget);
    double load = 0, largest = 0;
    const auto item_cost = [&](const Tile& t, int64_t n) {
      const double fixed = double(config.alpha) * (1 << kTileLog2[t.tile]) + (n > 1 ? config.part_cost : 0);
      return double(tile_cost(config, t)) / double(n) + fixed;
    };
    for (const Tile& t : tiles) {
      const int64_t n = std::max<int64_t>(1, ceil_div(t.kv_end - t.kv_begin, tokens[t.tile]));
      const double cost = item_cost(t, n);
      load += cost * double(n);
      largest = std::max(largest, cost);
    }
    int64_t large = 0;
    for (const Tile& t : tiles) {
      const int64_t n = std::max<int64_t>(1, ceil_div(t.kv_end - t.kv_begin, tokens[t.tile]));
      if (item_cost(t, n) > 0.75 * largest) large += n;
    }
    const int64_t waves = ceil_div(large * config.num_kv_heads, config.num_ctas);
    const double time = std::max(load * config.num_kv_heads / config.num_ctas,
                                 largest * (waves > 1 ? 0.75 + 0.25 / double(waves) : 1.0) * double(waves));
    if (time < best_time * 0.98) {
      best_time = time;
      best = budget;
    }
  }
  return best;
}

// Splits the tiles evenly under the budget and returns what the plan would hold.
PlanCapacity split_tiles(const PlannerConfig& config, int64_t budget, std::vector<Tile>& tiles) {
  PlanCapacity use{};
  const int64_t grid = config.invariant_grid;
  const int64_t align = grid > 0 ? grid : config.granule;
  int64_t tokens[kNumTiles];
  for (int i = 0; i < kNumTiles; ++i) tokens[i] = chunk_tokens(config, i, budget);
  int64_t items = 0, units = 0, parts = 0, rows = 0;
  for (Tile& t : tiles) {
    const int64_t len = t.kv_end - t.kv_begin;
    int64_t n = len <= tokens[t.tile] ? 1 : ceil_div(len, tokens[t.tile]);
    t.chunk_len = int32_t(n == 1 ? len : ceil_div(ceil_div(len, n), align) * align);
    if (n > 1) n = ceil_div(len, t.chunk_len);
    t.chunks = int32_t(n);
    items += n;
    if (n == 1) continue;
    // Invariant mode: the first item folds its grid chunks into one state, the others emit one each.
    const int64_t states = grid > 0 ? 1 + ceil_div(len - t.chunk_len, grid) : n;
    units += 1;
    parts += states;
    rows += states * t.q_rows;
  }
  const auto clip = [](int64_t v) {
    return int32_t(std::min<int64_t>(v, std::numeric_limits<int32_t>::max()));
  };
  use.items = clip(items);
  use.units = clip(units);
  use.parts = clip(parts);
  use.partial_rows = clip(rows);
  return use;
}

bool fits(const PlanCapacity& use, const PlanCapacity& cap) {
  return use.items <= cap.items && use.units <= cap.units && use.parts <= cap.parts &&
         use.partial_rows <= cap.partial_rows;
}

int32_t item_cost(const PlannerConfig& config, const Tile& t, int64_t kv_tokens, bool partial) {
  const int64_t cost = int64_t(config.alpha) * (1 << kTileLog2[t.tile]) +
                       int64_t(config.beta[t.tile]) * kv_tokens + (partial ? config.part_cost : 0);
  return int32_t(std::min<int64_t>(cost, std::numeric_limits<int32_t>::max()));
}

// Items in (request, tile, chunk) order and the reduction map.
void emit(const PlannerConfig& config, const std::vector<Tile>& tiles, std::vector<WorkItem>& items,
          MergeUnit* units, int32_t* parts) {
  items.clear();
  int32_t unit = 0, part = 0, row = 0;
  const int64_t grid = config.invariant_grid;
  for (const Tile& t : tiles) {
    const bool split = t.chunks > 1;
    if (split) units[unit] = {t.request, t.q_begin, t.q_rows, t.chunks, part, 0};
    int64_t begin = t.kv_begin;
    for (int32_t c = 0; c < t.chunks; ++c) {
      const int64_t end = c + 1 == t.chunks ? t.kv_end : begin + t.chunk_len;
      items.push_back({0, uint8_t(c == 0 ? kFirstChunk : 0), uint8_t(kTileLog2[t.tile]), t.q_rows, t.request,
                       t.q_begin, int32_t(begin), int32_t(end), split ? row : -1, split ? unit : -1,
                       item_cost(config, t, end - begin, split)});
      begin = end;
      if (!split) continue;
      const int64_t states = grid > 0 && c > 0 ? ceil_div(end - items.back().kv_begin, grid) : 1;
      for (int64_t s = 0; s < states; ++s, row += t.q_rows) parts[part++] = row;
    }
    if (split) units[unit++].parts_end = part;
  }
}

}  // namespace

int query_tile(int64_t packed_rows) {
  for (int i = 0; i < kNumTiles; ++i)
    if (packed_rows <= int64_t(1) << kTileLog2[i]) return i;
  return kNumTiles - 1;
}

// A request of n packed rows has one tile when n <= 128 and at most n / 128 + 1 otherwise, so there are at
// most R + T * group / 128 tiles. With budget >= total * heads / (4 * CTAs) the sum of cost / budget is at
// most S = 4 * CTAs / heads; a tile has at most cost / budget + 1 items, a split one more than budget of
// cost, so at most S splits, 2 S parts. make_plan() doubles the budget while a count is over: with an
// unlimited budget there are no partials at all, so that it always ends inside these bounds.
PlanCapacity plan_capacity(const PlannerConfig& config) {
  const int64_t rows = config.limits.max_tokens * config.group;
  const int64_t tiles = std::min(config.limits.max_requests + rows / kMaxQueryTile, rows);
  const int64_t splits = ceil_div(int64_t(kMaxSplitsPerCta) * config.num_ctas, config.num_kv_heads);
  const int64_t states = (config.invariant_grid > 0 ? 8 : 2) * splits;
  const int64_t units = std::min(tiles, splits);
  const int64_t height = std::min<int64_t>(kMaxQueryTile, rows);
  const int64_t items = tiles + splits;
  const int64_t tickets = items * config.num_kv_heads;
  const int64_t entries = config.planned_queues ? tickets : 0;
  const int64_t counters = 1 + units * config.num_kv_heads;
  for (int64_t v : {rows, tickets, states * height, counters, config.limits.max_requests})
    if (v > std::numeric_limits<int32_t>::max())
      fail("max_requests, max_tokens: expected a plan of fewer than 2^31 entries; got " + std::to_string(v) +
           ".");
  return {int32_t(config.limits.max_requests),
          int32_t(items),
          int32_t(units),
          int32_t(states),
          int32_t(states * height),
          config.planned_queues ? config.num_ctas : 0,
          int32_t(entries),
          int32_t(counters)};
}

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
  int64_t budget = choose_budget(config, scratch.tiles);
  PlanCapacity use = split_tiles(config, budget, scratch.tiles);
  while (!fits(use, cap)) {
    budget *= 2;
    use = split_tiles(config, budget, scratch.tiles);
  }

  auto* items = reinterpret_cast<WorkItem*>(buffer.data() + layout.items);
  auto* units = reinterpret_cast<MergeUnit*>(buffer.data() + layout.units);
  auto* parts = reinterpret_cast<int32_t*>(buffer.data() + layout.parts);
  auto* bounds = reinterpret_cast<int32_t*>(buffer.data() + layout.kv_len_bounds);
  emit(config, scratch.tiles, scratch.items, units, parts);

  scratch.keys.resize(scratch.items.size());
  for (size_t i = 0; i < scratch.items.size(); ++i)
    scratch.keys[i] = {uint32_t(scratch.items[i].cost), uint32_t(i)};
  sort_longest_first(scratch.keys, scratch.spare);
  for (size_t i = 0; i < scratch.items.size(); ++i) items[i] = scratch.items[scratch.keys[i].index];
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
  header.chunk =
      int32_t(std::min<int64_t>(chunk_tokens(config, 0, budget), std::numeric_limits<int32_t>::max()));
  header.num_ctas = config.num_ctas;
  header.num_kv_heads = config.num_kv_heads;
  header.group = config.group;
  header.invariant_grid = config.invariant_grid;
  header.num_queues = config.planned_queues ? config.num_ctas : 0;
  header.max_kv_len = kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
  std::memcpy(buffer.data() + layout.header, &header, sizeof(header));
}

}  // namespace fi
