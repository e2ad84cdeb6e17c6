// SPDX-License-Identifier: Apache-2.0
// The planner as one thread block: the bytes of planner.cc from lengths that only the device knows. `Block`
// is a CUDA thread block or its emulation on the host (collectives.h).
#pragma once
#include "device_budget.h"
#include "device_nodes.h"
#include "device_tiles.h"

namespace fi {

// kShares: with levels for shared prefixes, of which there may be none.
template <class Block, bool kShares = false>
class DevicePlanner {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;
  static_assert(kWarps <= kWarp);
  static constexpr int32_t kTiles = kShares ? kSharedTilesOfSharing : kSharedTiles;
  using Memory = DevicePlanMemory<kThreads, kTiles>;
  using Sort = BucketSort<Block, kSortBits>;

  // levels, nodes: null unless kShares; `nodes` is filled here.
  FI_DEVICE DevicePlanner(Block& block, const DevicePlanArgs& args, Memory& memory,
                          const Levels* levels = nullptr, NodeTables* nodes = nullptr)
      : block_(block),
        a_(args),
        c_(args.config),
        m_(memory),
        levels_(levels),
        nodes_(nodes),
        all_(block, memory.slots),
        sort_(block, memory.sort),
        thread_(block.thread()),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp) {}

  // num_levels: nodes in `levels`. Returns how many the plan has: all or none.
  FI_DEVICE int32_t run(int32_t num_levels = 0) {
    clear();
    int32_t* tile_begin = a_.num_requests <= kSharedRequests ? m_.tile_begin : a_.workspace;
    const uint32_t found = read_requests(tile_begin);
    if (found & ~kSeveralTiles) {
      if (thread_ == 0) {
        counters()[kFaults] = int32_t(found & ~kSeveralTiles);
        write_header(0, {}, 0, {});
      }
      return 0;
    }
    if constexpr (kShares) num_nodes_ = num_levels;
    if (kShares && num_nodes_ > 0) place_nodes();
    // Two copies of the same code, so that the one for most steps addresses shared memory as such.
    if (a_.num_requests <= kSharedRequests && num_tiles_ + node_tiles_ <= kTiles)
      plan(static_cast<const int32_t*>(m_.tile_begin), SharedTiles<kTiles>{m_.tiles}, found & kSeveralTiles);
    else
      plan(static_cast<const int32_t*>(tile_begin),
           GlobalTiles{a_.workspace + c_.limits.max_requests + 1, a_.tile_capacity}, found & kSeveralTiles);
    return num_nodes_;
  }

 private:
  static constexpr uint32_t kSeveralTiles = 1;  // beside the faults: some request has more than one tile
  using Counts = uint32_t[4];                   // items, units, parts, partial rows

  FI_DEVICE int32_t* counters() const { return section<int32_t>(a_.layout.counters); }
  template <class T>
  FI_DEVICE T* section(int64_t offset) const {
    return reinterpret_cast<T*>(a_.plan + offset);
  }

  FI_DEVICE void clear() {
    FI_ROLL
    for (int32_t i = thread_; i < a_.capacity.counters; i += kThreads) counters()[i] = 0;
    sort_.clear();
  }

  // Counts the tiles, copies the lengths, finds the longest; returns PlannerFault and kSeveralTiles.
  FI_DEVICE uint32_t read_requests(int32_t* tile_begin) {
    auto* bounds = section<int32_t>(a_.layout.kv_len_bounds);
    const int32_t requests = a_.num_requests;
    uint32_t found = 0, carry = 0;
    int32_t longest = 0;
    FI_ROLL
    for (int32_t base = 0; base < requests; base += kThreads) {
      const int32_t r = base + thread_;
      uint32_t count[1] = {0}, total[1];
      if (r < requests) {
        const int32_t first = a_.qo_indptr[r], last = a_.qo_indptr[r + 1], kv_len = a_.kv_lens[r];
        bounds[r] = kv_len;
        longest = kv_len > longest ? kv_len : longest;
        uint32_t bad = 0;
        if (first < 0 || last < first) bad |= kFaultStarts;
        if (!bad && last - first > c_.limits.max_tokens) bad |= kFaultTokens;
        if (kv_len < 0 || kv_len > c_.limits.max_kv_len) bad |= kFaultKvLens;
        if (!bad) {
          const uint32_t rows = uint32_t((last - first) * c_.group);
          const int kind = query_tile(c_, rows);
          count[0] = (rows + uint32_t(tile_height(kind)) - 1) >> tile_log2(kind);
          if (count[0] > 1) bad |= kSeveralTiles;
        }
        found |= bad;
      }
      all_.exclusive_scan(count, total);
      if (r < requests) tile_begin[r] = int32_t(saturating_add(carry, count[0]));
      carry = saturating_add(carry, total[0]);
    }
    if (thread_ == 0) {
      tile_begin[requests] = int32_t(carry);
      const int64_t first = a_.qo_indptr[0], last = a_.qo_indptr[requests];
      if (first < 0) found |= kFaultStarts;
      if (last - first > c_.limits.max_tokens) found |= kFaultTokens;
    }
    num_tiles_ = int32_t(carry);
    all_.post(0, block_.warp_max(uint32_t(longest)));
    all_.post(1, block_.warp_or(found));
    all_.meet();
    longest_ = int32_t(block_.warp_max(uint32_t(all_.posted(0))));
    return block_.warp_or(uint32_t(all_.posted(1)));
  }

  template <class Tiles>
  FI_DEVICE void plan(const int32_t* tile_begin, Tiles tiles, bool several_tiles) {
    const int64_t total = make_tiles(tile_begin, tiles, several_tiles);
    const bool many_tickets = has_many_tickets(c_, num_tiles_);
    choose_budget(tiles, total, m_.flat, many_tickets);
    const int32_t flat_tiles = num_tiles_;
    if constexpr (kShares)
      if (num_nodes_ > 0) compose(tile_begin, tiles, many_tickets);
    BudgetChoice& budget = kShares && num_nodes_ > 0 ? m_.composed : m_.flat;
    Counts use;
    const uint32_t greatest = split_tiles(tiles, budget, use);
    NodeUse nodes{};
    if constexpr (kShares)
      if (num_nodes_ > 0) nodes = emit_nodes(tile_begin, tiles, flat_tiles);
    if (thread_ == kThreads - 1)
      write_header(budget.chunk[budget.choice][0], use, a_.qo_indptr[a_.num_requests] - a_.qo_indptr[0],
                   nodes);
    emit_items(tiles, int32_t(use[0]), sort_shift(greatest));
  }

  template <class Tiles>
  FI_DEVICE NodeUse emit_nodes(const int32_t* tile_begin, Tiles tiles, int32_t flat_tiles) {
    NodeEmitter<Block, Tiles> emitter(block_, a_, *levels_, *nodes_, tile_begin, tiles, flat_tiles,
                                      num_tiles_);
    const NodeUse use = emitter.run(all_, num_nodes_, sort_.lend_ranks());
    sort_.clear_rank();
    return use;
  }

  // Counts the nodes' tiles and query tokens.
  FI_DEVICE void place_nodes() {
    uint32_t carry[2] = {0, 0};
    FI_ROLL
    for (int32_t base = 0; base < num_nodes_; base += kThreads) {
      const int32_t j = base + thread_;
      const int32_t tokens = j < num_nodes_ ? levels_->tokens[j] : 0;
      uint32_t before[2] = {0, uint32_t(tokens)}, total[2];
      if (j < num_nodes_) before[0] = uint32_t(node_tile_count(c_, tokens));
      all_.exclusive_scan(before, total);
      if (j < num_nodes_) {
        nodes_->tile[j] = num_tiles_ + int32_t(carry[0] + before[0]);
        nodes_->tokens_begin[j] = int32_t(carry[1] + before[1]);
      }
      carry[0] += total[0];
      carry[1] += total[1];
    }
    node_tiles_ = int32_t(carry[0]);
    block_.sync();
  }

  // Puts the nodes' tiles behind those of the requests, unless the step is quicker without; then there are
  // no nodes any more.
  template <class Tiles>
  FI_DEVICE void compose(const int32_t* tile_begin, Tiles tiles, bool many_tickets) {
    const int32_t flat_tiles = num_tiles_;
    set_own_tiles(tile_begin, tiles, true);
    num_tiles_ += node_tiles_;
    FI_ROLL
    for (int32_t t = flat_tiles + thread_; t < num_tiles_; t += kThreads) {
      const int32_t j = find_last(nodes_->tile, num_nodes_, t), tokens = levels_->tokens[j];
      set_tile(tiles, t,
               node_tile(j, levels_->begin[j], levels_->end[j], node_kind(c_, tokens), tokens * c_.group,
                         t - nodes_->tile[j]));
    }
    block_.sync();
    int64_t total = 0;
    FI_ROLL
    for (int32_t t = thread_; t < num_tiles_; t += kThreads)
      total +=
          scale_cost(tile_cost(c_, shape_kind(tiles.at(kShape, t)), tile_length(tiles, t)), a_.cost_shift);
    all_.post(0, warp_sum64(block_, total));
    all_.meet();
    choose_budget(tiles, warp_sum64(block_, all_.posted(0)), m_.composed, many_tickets);
    if (many_tickets || is_quicker(c_, m_.composed.time, m_.flat.time, a_.cost_shift)) return;
    set_own_tiles(tile_begin, tiles, false);
    num_tiles_ = flat_tiles;
    num_nodes_ = 0;
    block_.sync();
  }

  // The one tile of each composed request begins behind its nodes, or with its first key.
  template <class Tiles>
  FI_DEVICE void set_own_tiles(const int32_t* tile_begin, Tiles tiles, bool composed) {
    const int32_t requests = a_.num_requests < kForestRequests ? a_.num_requests : kForestRequests;
    FI_ROLL
    for (int32_t r = thread_; r < requests; r += kThreads) {
      const int32_t leaf = levels_->leaf[r];
      if (leaf < 0) continue;
      const int32_t t = tile_begin[r];
      tiles.at(kKvBegin, t) = composed ? levels_->end[leaf] : 0;
      tiles.at(kShape, t) ^= kOwn << 4;
    }
  }

  template <class Tiles>
  FI_DEVICE void set_tile(Tiles tiles, int32_t t, const Tile& tile) {
    tiles.at(kRequest, t) = tile.request;
    tiles.at(kQBegin, t) = tile.q_begin;
    tiles.at(kKvBegin, t) = tile.kv_begin;
    tiles.at(kKvEnd, t) = tile.kv_end;
    tiles.at(kShape, t) = tile_shape(tile);
  }

  template <class Tiles>
  FI_DEVICE int64_t make_tiles(const int32_t* tile_begin, Tiles tiles, bool several_tiles) {
    int64_t total = 0;
    const auto make = [&](int32_t request, int32_t tile, int32_t number) {
      const int32_t q_len = a_.qo_indptr[request + 1] - a_.qo_indptr[request];
      const int kind = query_tile(c_, int64_t(q_len) * c_.group);
      const Tile t = make_tile(c_, request, q_len, a_.kv_lens[request], kind, number * tile_height(kind));
      set_tile(tiles, tile, t);
      total += scale_cost(tile_cost(c_, kind, t.kv_end - t.kv_begin), a_.cost_shift);
    };
    FI_ROLL
    for (int32_t r = thread_; r < a_.num_requests; r += kThreads)
      if (tile_begin[r + 1] - tile_begin[r] == 1) make(r, tile_begin[r], 0);
    if (several_tiles) {
      FI_ROLL
      for (int32_t t = thread_; t < num_tiles_; t += kThreads) {
        const int32_t r = find_last(tile_begin, a_.num_requests, t);
        if (tile_begin[r + 1] - tile_begin[r] > 1) make(r, t, t - tile_begin[r]);
      }
    }
    all_.post(0, warp_sum64(block_, total));
    all_.meet();
    return warp_sum64(block_, all_.posted(0));
  }

  template <class Tiles>
  FI_DEVICE void choose_budget(Tiles tiles, int64_t total, BudgetChoice& budget, bool many_tickets) {
    BudgetChooser<Block, kShares>(block_, c_, a_.cost_shift, m_.loads)
        .choose(tiles, num_tiles_, total, budget, many_tickets);
  }

  // Cuts the tiles, writes the merge units; returns the greatest cost of an item.
  template <class Tiles>
  FI_DEVICE uint32_t split_tiles(Tiles tiles, BudgetChoice& budget, Counts& use) {
    const PlanCapacity& cap = a_.capacity;
    FI_ROLL
    for (;;) {
      uint32_t greatest = 0;
      for (uint32_t& n : use) n = 0;
      if (kShares && num_nodes_ > 0) cut_paths(budget);
      FI_ROLL
      for (int32_t base = 0; base < num_tiles_; base += kThreads) {
        Counts before = {0, 0, 0, 0}, total;
        const int32_t t = base + thread_;
        Split s{};
        int32_t q_rows = 0;
        if (t < num_tiles_) {
          const int32_t shape = tiles.at(kShape, t);
          const int kind = shape_kind(shape);
          const TileLevel level = kShares ? shape_level(shape) : kFlat;
          q_rows = shape_rows(shape);
          s = split_tile(c_, level, tile_length(tiles, t), budget.chunk[budget.choice][kind]);
          const bool partial = s.chunks > 1 || level != kFlat;
          const uint32_t cost = uint32_t(saturate32(item_cost(c_, level, kind, s.chunk_len, partial)));
          greatest = cost > greatest ? cost : greatest;
          const uint64_t rows = uint64_t(s.states) * uint32_t(q_rows);
          before[0] = uint32_t(s.chunks);
          before[1] = level != kNode && partial;
          before[2] = level == kNode ? 0 : s.states < kSaturated ? s.states : kSaturated;
          if (level == kOwn) before[2] = saturating_add(before[2], path_chunks(tiles, t));
          before[3] = rows < kSaturated ? uint32_t(rows) : kSaturated;
        }
        all_.exclusive_scan(before, total);
        for (int k = 0; k < 4; ++k) before[k] = saturating_add(before[k], use[k]);
        for (int k = 0; k < 4; ++k) use[k] = saturating_add(use[k], total[k]);
        if (t < num_tiles_) keep_split(tiles, t, s, before, q_rows);
      }
      all_.post(0, block_.warp_max(greatest));
      all_.meet();
      greatest = block_.warp_max(uint32_t(all_.posted(0)));
      if (int32_t(use[0]) <= cap.items && int32_t(use[1]) <= cap.units && int32_t(use[2]) <= cap.parts &&
          int32_t(use[3]) <= cap.partial_rows)
        return greatest;
      double_budget(budget);
    }
  }

  // By node: chunks from the root to it.
  FI_DEVICE void cut_paths(const BudgetChoice& budget) {
    FI_ROLL
    for (int32_t j = thread_; j < num_nodes_; j += kThreads) {
      int32_t chunks = 0;
      FI_ROLL
      for (int32_t up = j; up >= 0; up = levels_->parent[up]) {
        const int kind = node_kind(c_, levels_->tokens[up]);
        chunks +=
            split_tile(c_, kNode, levels_->end[up] - levels_->begin[up], budget.chunk[budget.choice][kind])
                .chunks;
      }
      nodes_->path_chunks[j] = chunks;
    }
    block_.sync();
  }

  // Of the nodes above a composed request's tile.
  template <class Tiles>
  FI_DEVICE uint32_t path_chunks(Tiles tiles, int32_t t) const {
    return uint32_t(nodes_->path_chunks[levels_->leaf[tiles.at(kRequest, t)]]);
  }

  template <class Tiles>
  FI_DEVICE void keep_split(Tiles tiles, int32_t t, const Split& s, const Counts& before, int32_t q_rows) {
    tiles.at(kChunkLen, t) = s.chunk_len;
    tiles.at(kChunks, t) = s.chunks;
    tiles.at(kFirstItem, t) = int32_t(before[0]);
    tiles.at(kUnit, t) = int32_t(before[1]);
    tiles.at(kFirstPart, t) = int32_t(before[2]);
    tiles.at(kFirstRow, t) = int32_t(before[3]);
    const TileLevel level = kShares ? shape_level(tiles.at(kShape, t)) : kFlat;
    if (s.states == 0 || level == kNode || int32_t(before[1]) >= a_.capacity.units) return;
    const int32_t request = tiles.at(kRequest, t);
    const uint32_t states = level == kOwn ? s.states + path_chunks(tiles, t) : s.states;
    section<MergeUnit>(a_.layout.units)[before[1]] = {request,
                                                      tiles.at(kQBegin, t),
                                                      q_rows,
                                                      s.chunks,
                                                      int32_t(before[2]),
                                                      int32_t(before[2] + states),
                                                      level == kOwn ? a_.qo_indptr[request] : -1,
                                                      0};
  }

  FI_DEVICE void double_budget(BudgetChoice& budget) {
    if (warp_ == 0) {
      // A second doubling starts from the first one's.
      const int64_t last = first_doubling_ ? candidate_budget(budget.ideal, budget.choice) : budget.ideal;
      const int64_t doubled = last < kMaxBudget / 2 ? 2 * last : kMaxBudget;
      if (lane_ < kNumTiles) budget.chunk[budget.choice][lane_] = chunk_tokens(c_, lane_, doubled);
      block_.sync_warp();
      if (lane_ == 0) budget.ideal = doubled;
    }
    first_doubling_ = false;
    block_.sync();
  }

  struct ItemKey {
    int32_t tile = 0;
    typename Sort::Key key;
  };

  template <class Tiles>
  FI_DEVICE ItemKey item_key(Tiles tiles, int32_t item, int32_t num_items, int shift) {
    ItemKey k;
    int bucket = 0;
    if (item < num_items) {
      k.tile = num_items == num_tiles_ ? item : find_last(&tiles.at(kFirstItem, 0), num_tiles_, item);
      bucket = sort_bucket(uint32_t(item_of(tiles, item, k.tile).cost), shift);
    }
    k.key = sort_.key(bucket, item < num_items);
    return k;
  }

  template <class Tiles>
  FI_DEVICE WorkItem item_of(Tiles tiles, int32_t item, int32_t t) const {
    const int32_t shape = tiles.at(kShape, t);
    const TileLevel level = kShares ? shape_level(shape) : kFlat;
    const Tile tile{tiles.at(kRequest, t),
                    tiles.at(kQBegin, t),
                    tiles.at(kKvBegin, t),
                    tiles.at(kKvEnd, t),
                    uint8_t(shape_kind(shape)),
                    uint16_t(shape_rows(shape)),
                    level};
    const Split split{tiles.at(kChunkLen, t), tiles.at(kChunks, t), 0};
    int32_t first_row = tiles.at(kFirstRow, t), chunk_rows = 0;
    if (level == kNode) {
      first_row = tiles.at(kFirstRow, nodes_->tile[tile.request]) + tile.q_begin;
      chunk_rows = levels_->tokens[tile.request] * c_.group;
    }
    return make_item(c_, tile, split, item - tiles.at(kFirstItem, t), tiles.at(kUnit, t), first_row,
                     chunk_rows);
  }

  // A round of kThreads items after the other; warps without an item skip what whole warps do.
  template <class Tiles>
  FI_DEVICE void emit_items(Tiles tiles, int32_t num_items, int shift) {
    ItemKey first;
    FI_ROLL
    for (int32_t base = 0; base + warp_ * kWarp < num_items; base += kThreads) {
      const ItemKey k = item_key(tiles, base + thread_, num_items, shift);
      sort_.count(k.key);
      if (base == 0) first = k;
    }
    sort_.end_counting();
    FI_ROLL
    for (int32_t base = 0; base < num_items; base += kThreads) {
      const int32_t item = base + thread_, left = num_items - base;
      ItemKey k = first;
      if (base > 0) {
        k = {};
        if (base + warp_ * kWarp < num_items) k = item_key(tiles, item, num_items, shift);
      }
      const uint32_t at = sort_.place(k.key, left < kThreads ? (left + kWarp - 1) / kWarp : kWarps);
      if (item < num_items) write_item(tiles, item, k.tile, at);
      if (left > kThreads) sort_.next_round();
    }
  }

  template <class Tiles>
  FI_DEVICE void write_item(Tiles tiles, int32_t item, int32_t t, uint32_t at) {
    const WorkItem w = item_of(tiles, item, t);
    block_.store(section<WorkItem>(a_.layout.items) + at, w);
    if (w.unit < 0 || w.flags & kPrefix) return;
    const int32_t grid = c_.invariant_grid;
    const bool many = grid > 0 && !(w.flags & kFirstChunk);
    const int32_t count = many ? int32_t(ceil_div32(uint32_t(w.kv_end - w.kv_begin), uint32_t(grid))) : 1;
    const Split split{tiles.at(kChunkLen, t), tiles.at(kChunks, t), 0};
    const uint32_t before = states_before(c_, split, item - tiles.at(kFirstItem, t));
    int32_t* parts = section<int32_t>(a_.layout.parts) + tiles.at(kFirstPart, t) + before;
    if (kShares && shape_level(tiles.at(kShape, t)) == kOwn) parts += path_chunks(tiles, t);
    FI_ROLL
    for (int32_t i = 0; i < count; ++i) parts[i] = w.partial + i * w.q_rows;
  }

  FI_DEVICE void write_header(int32_t chunk, const Counts& use, int32_t num_tokens, const NodeUse& nodes) {
    PlanHeader h{};
    h.magic = kPlanMagic;
    h.version = kPlanVersion;
    h.num_requests = a_.num_requests;
    h.num_tokens = num_tokens;
    h.num_items = int32_t(use[0]);
    h.num_units = int32_t(use[1]);
    h.num_parts = int32_t(use[2]);
    h.num_partial_rows = int32_t(use[3]);
    h.chunk = chunk;
    h.num_ctas = c_.num_ctas;
    h.num_kv_heads = c_.num_kv_heads;
    h.group = c_.group;
    h.invariant_grid = c_.invariant_grid;
    h.max_kv_len = longest_;
    h.num_nodes = num_nodes_;
    h.num_node_tokens = nodes.tokens;
    h.num_reports = nodes.reports;
    *section<PlanHeader>(a_.layout.header) = h;
  }

  Block& block_;
  const DevicePlanArgs& a_;
  const PlannerConfig& c_;
  Memory& m_;
  const Levels* const levels_;
  NodeTables* const nodes_;
  Collectives<Block, 4> all_;
  Sort sort_;
  const int thread_, warp_, lane_;
  int32_t num_tiles_ = 0, longest_ = 0, num_nodes_ = 0, node_tiles_ = 0;
  bool first_doubling_ = true;
};

}  // namespace fi
