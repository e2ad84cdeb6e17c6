// SPDX-License-Identifier: Apache-2.0
// The planner as one thread block: the bytes of planner.cc from lengths that only the device knows. `Block`
// is a CUDA thread block or its emulation on the host (collectives.h).
#pragma once
#include "device_budget.h"
#include "device_items.h"
#include "device_nodes.h"
#include "device_tiles.h"
#include "device_uncut.h"

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

  // levels, nodes: null unless kShares; `nodes` is filled here. cuts: read where the count
  // of levels says that they are known; then there are `lists` too.
  FI_DEVICE DevicePlanner(Block& block, const DevicePlanArgs& args, Memory& memory, Levels* levels = nullptr,
                          NodeTables* nodes = nullptr, const NodeCuts* cuts = nullptr,
                          GatheredLists* lists = nullptr)
      : block_(block),
        a_(args),
        c_(args.config),
        m_(memory),
        levels_(levels),
        nodes_(nodes),
        cuts_(cuts),
        lists_(lists),
        all_(block, memory.slots),
        sort_(block, memory.sort),
        budgets_(block, args.config, args.cost_shift, memory.budget),
        thread_(block.thread()) {}

  FI_DEVICE void run() {
    begin([] {});
    finish();
  }

  // What needs no levels: counts the tiles of the requests and makes them where shared memory holds them.
  // between(): called behind a barrier, and has another one behind it.
  template <class Between>
  FI_DEVICE void begin(Between between) {
    found_ = read_requests();
    between();
    made_ = num_tiles_ <= kTiles && !(found_ & ~kSeveralTiles);
    // Else some thread reads where the tiles of another one's requests begin.
    own_only_ = made_ && !(found_ & kSeveralTiles) && a_.num_requests <= kThreads;
    if (!own_only_) block_.sync();
    if (made_) flat_total_ = make_tiles(static_cast<const int32_t*>(m_.tile_begin), shared_tiles());
  }

  // The budget behind begin(), for LevelChooser.
  struct LevelsBudget {
    DevicePlanner& planner;
    FI_DEVICE bool is_known() const {
      const DevicePlanner& p = planner;
      return p.made_ && p.a_.cost_shift == 0 && has_many_tickets(p.c_, p.num_tiles_);
    }
    FI_DEVICE void set(int64_t saved, int64_t nodes) {
      planner.budgets_.set_ideal_chunks(planner.flat_total_ - saved, nodes);
    }
    FI_DEVICE int32_t chunk(int kind, int32_t length) const {
      return planner.budgets_.last_warps_node_chunk(kind, length);
    }
    FI_DEVICE int32_t least_chunk() const { return planner.budgets_.last_warps_least_chunk(); }
  };
  FI_DEVICE LevelsBudget levels_budget() { return {*this}; }

  // levels: how many there are. Returns how many nodes the plan has: all or none.
  FI_DEVICE int32_t finish(const LevelCounts& levels = {}) {
    if (found_ & ~kSeveralTiles) {
      if (thread_ == 0) {
        counters()[kFaults] = int32_t(found_ & ~kSeveralTiles);
        write_header(0, {}, 0, 0);
      }
      return 0;
    }
    if constexpr (kShares) count_ = levels;
    // Two copies of the same code, so that the one for most steps addresses shared memory as such.
    if (made_ && num_tiles_ + count_.tiles <= kTiles) {
      if (!plan_uncut()) plan(static_cast<const int32_t*>(m_.tile_begin), shared_tiles());
    } else {
      const GlobalTiles tiles{a_.workspace + c_.limits.max_requests + 1, a_.tile_capacity};
      flat_total_ = make_tiles(tile_begin(), tiles);
      plan(tile_begin(), tiles);
    }
    return count_.nodes;
  }

 private:
  // What its tiles are made of.
  struct OwnRequest {
    int32_t token, q_len, kv_len;
    int32_t begin, tiles;  // of its tiles
  };

  static constexpr uint32_t kSeveralTiles = 1;  // beside the faults: some request has more than one tile
  using Counts = uint32_t[4];                   // items, units, parts, partial rows

  FI_DEVICE int32_t* counters() const { return section<int32_t>(a_.layout.counters); }
  template <class T>
  FI_DEVICE T* section(int64_t offset) const {
    return reinterpret_cast<T*>(a_.plan + offset);
  }
  FI_DEVICE SharedTiles<kTiles> shared_tiles() const { return {m_.tiles}; }
  FI_DEVICE int32_t* tile_begin() const { return a_.num_requests <= kTiles ? m_.tile_begin : a_.workspace; }

  FI_DEVICE void clear() {
    FI_ROLL
    for (int32_t i = thread_; i < a_.capacity.counters; i += kThreads) counters()[i] = 0;
    sort_.clear();
  }

  // Clears, counts the tiles, copies the lengths, finds the longest; returns PlannerFault and kSeveralTiles.
  // Has a barrier before tile_begin() is written.
  FI_DEVICE uint32_t read_requests() {
    int32_t* const begins = tile_begin();
    auto* bounds = section<int32_t>(a_.layout.kv_len_bounds);
    const int32_t requests = a_.num_requests;
    uint32_t found = 0, carry = 0;
    int32_t longest = 0;
    // By a thread that mostly has no request.
    if (thread_ == kThreads - 1) {
      const int64_t first = a_.qo_indptr[0], last = a_.qo_indptr[requests];
      if (first < 0) found |= kFaultStarts;
      if (last - first > c_.limits.max_tokens) found |= kFaultTokens;
      num_tokens_ = int32_t(last - first);
    }
    int32_t base = 0;
    FI_ROLL
    do {
      const int32_t r = base + thread_;
      uint32_t count[1] = {0}, total[1], tiles = 0;
      int32_t first = 0, last = 0, kv_len = 0;
      if (r < requests) {
        first = a_.qo_indptr[r];
        last = a_.qo_indptr[r + 1];
        kv_len = a_.kv_lens[r];
      }
      // While they come.
      if (base == 0) clear();
      if (r < requests) {
        bounds[r] = kv_len;
        longest = kv_len > longest ? kv_len : longest;
        uint32_t bad = 0;
        if (first < 0 || last < first) bad |= kFaultStarts;
        if (!bad && last - first > c_.limits.max_tokens) bad |= kFaultTokens;
        if (kv_len < 0 || kv_len > c_.limits.max_kv_len) bad |= kFaultKvLens;
        if (!bad) {
          const uint32_t rows = uint32_t((last - first) * c_.group);
          const int kind = query_tile(c_, rows);
          count[0] = tiles = (rows + uint32_t(tile_height(kind)) - 1) >> tile_log2(kind);
          if (tiles > 1) bad |= kSeveralTiles;
        }
        found |= bad;
      }
      // What has been found up to the last round stands behind its barrier.
      all_.post(1, block_.warp_max(uint32_t(longest)));
      all_.post(2, block_.warp_or(found));
      all_.exclusive_scan(count, total);
      const auto begin = int32_t(saturating_add(carry, count[0]));
      if (r < requests) begins[r] = begin;
      if (base == 0) own_ = {first, last - first, kv_len, begin, int32_t(tiles)};
      carry = saturating_add(carry, total[0]);
      base += kThreads;
    } while (base < requests);
    if (thread_ == 0) begins[requests] = int32_t(carry);
    num_tiles_ = int32_t(carry);
    longest_ = int32_t(block_.warp_max(uint32_t(all_.posted(1))));
    return block_.warp_or(uint32_t(all_.posted(2)));
  }

  // Most steps of many tickets; returns false where another way is needed.
  FI_DEVICE bool plan_uncut() {
    if (!has_many_tickets(c_, num_tiles_) || (found_ & kSeveralTiles)) return false;
    using Tiles = SharedTiles<kTiles>;
    using Uncut = UncutPlanner<Block, Tiles, kShares>;
    if (!Uncut::applies(a_, count_, num_tiles_)) return false;
    const auto* const tile_begin = static_cast<const int32_t*>(m_.tile_begin);
    const Tiles tiles = shared_tiles();
    Uncut uncut(block_, a_, all_, sort_, budgets_, levels_, nodes_, cuts_, lists_, count_, tiles, num_tiles_);
    const auto header = [&](const typename Uncut::Use& use) {
      const Counts counts = {uint32_t(use.items), uint32_t(use.units), uint32_t(use.parts),
                             uint32_t(use.rows)};
      write_header(budgets_.last_warps_chunk(0), counts, num_tokens_, use.reports);
    };
    if constexpr (kShares)
      return uncut.run(flat_total_,
                       NodeEmitter<Block, Tiles>(block_, a_, *levels_, *nodes_, count_, tile_begin, tiles,
                                                 num_tiles_, num_tiles_ + count_.tiles),
                       header);
    else
      return uncut.run(flat_total_, 0, header);
  }

  template <class Tiles>
  FI_DEVICE void plan(const int32_t* tile_begin, Tiles tiles) {
    const bool many_tickets = has_many_tickets(c_, num_tiles_);
    const int32_t flat_tiles = num_tiles_;
    Budget budget{};
    // With many tickets a step that has levels is composed without a question.
    if (!many_tickets || count_.nodes == 0)
      budget = budgets_.choose(tiles, num_tiles_, num_tiles_, flat_total_, 0, many_tickets);
    if constexpr (kShares)
      if (count_.nodes > 0) compose(tile_begin, tiles, many_tickets, budget);
    Counts use;
    const uint32_t greatest = split_tiles(tiles, budget, use, flat_tiles);
    int32_t reports = 0;
    if constexpr (kShares)
      if (count_.nodes > 0) reports = emit_nodes(tile_begin, tiles, flat_tiles);
    if (thread_ == kThreads - 1) write_header(budgets_.chunk(0), use, num_tokens_, reports);
    ItemEmitter<Block, Tiles, kShares> items(block_, a_, all_, sort_, levels_, nodes_, count_, tiles,
                                             num_tiles_);
    items.run(int32_t(use[0]), sort_shift(c_, greatest), [&](int task, int step, int32_t end) {
      if constexpr (kShares)
        if (count_.nodes > 0 && count_.single_rows) {
          auto nodes = node_emitter(tile_begin, tiles, flat_tiles);
          nodes.put_single_rows(nodes.lists(), task, step, end);
        }
    });
  }

  template <class Tiles>
  FI_DEVICE NodeEmitter<Block, Tiles> node_emitter(const int32_t* tile_begin, Tiles tiles,
                                                   int32_t flat_tiles) {
    return {block_, a_, *levels_, *nodes_, count_, tile_begin, tiles, flat_tiles, num_tiles_};
  }

  template <class Tiles>
  FI_DEVICE int32_t emit_nodes(const int32_t* tile_begin, Tiles tiles, int32_t flat_tiles) {
    return node_emitter(tile_begin, tiles, flat_tiles).run(all_);
  }

  // Puts the nodes' tiles behind those of the requests, unless the step is quicker without; then there are
  // no nodes any more.
  template <class Tiles>
  FI_DEVICE void compose(const int32_t* tile_begin, Tiles tiles, bool many_tickets, Budget& budget) {
    const int32_t flat_tiles = num_tiles_;
    // No less than 0: what is saved is a part of what this thread's tiles cost.
    int64_t cost[2] = {flat_cost_ - set_own_tiles(tile_begin, tiles, true), 0};  // of all tiles, of nodes'
    num_tiles_ += count_.tiles;
    // By the threads whose tiles they are later: other warps than those of the requests, which need other
    // code.
    FI_ROLL
    for (int32_t i = (thread_ - flat_tiles) & (kThreads - 1); i < count_.tiles; i += kThreads) {
      const int32_t j = find_owner(levels_->tile, count_.nodes, count_.tiles, i), tokens = levels_->tokens[j];
      const Tile tile = node_tile(j, levels_->begin(j), levels_->end[j], levels_->kind(j), tokens * c_.group,
                                  i - levels_->tile[j]);
      set_tile(tiles, flat_tiles + i, tile);
      cost[1] += scale_cost(tile_cost(c_, tile.kind, tile.kv_end - tile.kv_begin), a_.cost_shift);
    }
    cost[0] += cost[1];
    if (count_.single_rows) node_emitter(tile_begin, tiles, flat_tiles).count_members(0);
    warp_sums64(block_, cost);
    for (int k = 0; k < 2; ++k) all_.post(k, cost[k]);
    all_.meet();
    for (int k = 0; k < 2; ++k) cost[k] = all_.posted(k);
    warp_sums64(block_, cost);
    if (count_.single_rows) node_emitter(tile_begin, tiles, flat_tiles).add_members();
    const Budget composed = budgets_.choose(tiles, num_tiles_, flat_tiles, cost[0], cost[1], many_tickets);
    if (many_tickets || is_quicker(c_, composed.time, budget.time, a_.cost_shift)) {
      budget = composed;
      return;
    }
    set_own_tiles(tile_begin, tiles, false);
    budgets_.set_chunks(budget.item);
    num_tiles_ = flat_tiles;
    count_ = {};
    block_.sync();
  }

  // The one tile of each composed request begins behind its nodes, or with its first key. Returns what the
  // thread's tiles cost less for it.
  template <class Tiles>
  FI_DEVICE int64_t set_own_tiles(const int32_t* tile_begin, Tiles tiles, bool composed) {
    const int32_t requests = a_.num_requests < kForestRequests ? a_.num_requests : kForestRequests;
    int64_t saved = 0;
    FI_ROLL
    for (int32_t r = thread_; r < requests; r += kThreads) {
      const int32_t leaf = levels_->leaf[r];
      if (leaf < 0) continue;
      const int32_t t = tile_begin[r], kind = shape_kind(tiles.at(kShape, t)), end = levels_->end[leaf];
      const int32_t length = tiles.at(kKvEnd, t);
      saved += scale_cost(tile_cost(c_, kind, length), a_.cost_shift) -
               scale_cost(tile_cost(c_, kind, length - end), a_.cost_shift);
      tiles.at(kKvBegin, t) = composed ? end : 0;
      tiles.at(kShape, t) ^= kOwn << 4;
    }
    return saved;
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
  FI_DEVICE int64_t make_tiles(const int32_t* tile_begin, Tiles tiles) {
    int64_t total = 0;
    const auto make = [&](int32_t request, const OwnRequest& own, int32_t tile, int32_t number) {
      const int kind = query_tile(c_, int64_t(own.q_len) * c_.group);
      const Tile t = make_tile(c_, request, own.q_len, own.kv_len, kind, number * tile_height(kind));
      set_tile(tiles, tile, t);
      tiles.at(kToken, tile) = own.token;
      total += scale_cost(tile_cost(c_, kind, t.kv_end - t.kv_begin), a_.cost_shift);
    };
    const auto read = [&](int32_t r) {
      const int32_t token = a_.qo_indptr[r], q_len = a_.qo_indptr[r + 1] - token;
      return OwnRequest{token, q_len, a_.kv_lens[r], tile_begin[r], tile_begin[r + 1] - tile_begin[r]};
    };
    FI_ROLL
    for (int32_t r = thread_; r < a_.num_requests; r += kThreads) {
      const OwnRequest own = own_only_ ? own_ : read(r);
      if (own.tiles == 1) make(r, own, own.begin, 0);
    }
    if (found_ & kSeveralTiles) {
      FI_ROLL
      for (int32_t t = thread_; t < num_tiles_; t += kThreads) {
        const int32_t r = find_last(tile_begin, a_.num_requests, t);
        const OwnRequest own = read(r);
        if (own.tiles > 1) make(r, own, t, t - own.begin);
      }
    }
    flat_cost_ = total;
    all_.post(0, warp_sum64(block_, total));
    all_.meet();
    return warp_sum64(block_, all_.posted(0));
  }

  // Cuts the tiles, writes the merge units; returns the greatest cost of an item. Ends with a barrier.
  template <class Tiles>
  FI_DEVICE uint32_t split_tiles(Tiles tiles, Budget& budget, Counts& use, int32_t flat_tiles) {
    const PlanCapacity& cap = a_.capacity;
    bool own_share = kShares && count_.nodes > 0;  // nodes have a budget of their own
    FI_ROLL
    for (;;) {
      uint32_t greatest = 0;
      for (uint32_t& n : use) n = 0;
      int32_t base = 0;
      FI_ROLL
      do {
        Counts before = {0, 0, 0, 0}, total;
        const int32_t t = base + thread_;
        Split s{};
        int32_t q_rows = 0, shared = 0;  // items of the nodes above
        if (t < num_tiles_) {
          const int32_t shape = tiles.at(kShape, t);
          const int kind = shape_kind(shape);
          const TileLevel level = kShares ? shape_level(shape) : kFlat;
          q_rows = shape_rows(shape);
          s = cut(tiles, t, level, kind, shared);
          const bool partial = s.chunks > 1 || level != kFlat;
          const uint32_t cost = uint32_t(saturate32(item_cost(c_, level, kind, s.chunk_len, partial)));
          greatest = cost > greatest ? cost : greatest;
          const uint64_t rows = uint64_t(s.states) * uint32_t(q_rows);
          before[0] = uint32_t(s.chunks);
          before[1] = level != kNode && partial;
          before[2] = level == kNode ? 0 : s.states < kSaturated ? s.states : kSaturated;
          if (level == kOwn) before[2] = saturating_add(before[2], uint32_t(shared));
          before[3] = rows < kSaturated ? uint32_t(rows) : kSaturated;
        }
        all_.post(4, block_.warp_max(greatest));
        all_.exclusive_scan(before, total);
        for (int k = 0; k < 4; ++k) before[k] = saturating_add(before[k], use[k]);
        for (int k = 0; k < 4; ++k) use[k] = saturating_add(use[k], total[k]);
        if (t < num_tiles_) keep_split(tiles, t, s, before, q_rows, shared, flat_tiles);
        base += kThreads;
      } while (base < num_tiles_);
      greatest = block_.warp_max(uint32_t(all_.posted(4)));
      block_.sync();
      if (int32_t(use[0]) <= cap.items && int32_t(use[1]) <= cap.units && int32_t(use[2]) <= cap.parts &&
          int32_t(use[3]) <= cap.partial_rows)
        return greatest;
      // The step's budget alone may be enough.
      if (!own_share) budget.item = budget.item < kMaxBudget / 2 ? 2 * budget.item : kMaxBudget;
      own_share = false;
      budgets_.set_chunks(budget.item);
    }
  }

  // How the tile is cut; above: items of the nodes above. A loop, so that the divisions stand here once.
  template <class Tiles>
  FI_DEVICE Split cut(Tiles tiles, int32_t t, TileLevel level, int kind, int32_t& above) {
    int32_t length = tile_length(tiles, t), up = -1, named = 0;
    if constexpr (kShares) {
      named = tiles.at(kRequest, t);
      // All tiles of a node lie below the same ones, which the first one asks.
      if (level == kOwn) up = levels_->leaf[named];
      if (level == kNode && tiles.at(kQBegin, t) == 0) up = levels_->parent[named];
    }
    Split own{};
    FI_ROLL
    for (bool first = true;; first = false) {
      const Split s = split_tile(c_, level, length, budgets_.chunk(kind, length, !first || level == kNode));
      if (first)
        own = s;
      else
        above += s.chunks;
      if (!kShares || up < 0) break;
      length = levels_->end[up] - levels_->begin(up);
      kind = levels_->kind(up);
      up = levels_->parent[up];
    }
    if (kShares && level == kNode && tiles.at(kQBegin, t) == 0)
      nodes_->path_chunks[named] = above + own.chunks;
    return own;
  }

  template <class Tiles>
  FI_DEVICE void keep_split(Tiles tiles, int32_t t, const Split& s, const Counts& before, int32_t q_rows,
                            int32_t shared, int32_t flat_tiles) {
    tiles.at(kChunkLen, t) = s.chunk_len;
    tiles.at(kChunks, t) = s.chunks;
    tiles.at(kFirstItem, t) = int32_t(before[0]);
    tiles.at(kUnit, t) = int32_t(before[1]);
    tiles.at(kFirstPart, t) = int32_t(before[2]);
    tiles.at(kFirstRow, t) = int32_t(before[3]);
    const TileLevel level = kShares ? shape_level(tiles.at(kShape, t)) : kFlat;
    if (level == kNode) {
      if (count_.single_rows) tiles.at(kUnit, t) = begin_report(tiles, t, t - flat_tiles);
      return;
    }
    if (s.states == 0 || int32_t(before[1]) >= a_.capacity.units) return;
    const int32_t request = tiles.at(kRequest, t);
    block_.store(section<MergeUnit>(a_.layout.units) + before[1],
                 MergeUnit{request, tiles.at(kQBegin, t), q_rows,
                           // A single row is in one tile of each node above.
                           s.chunks + (count_.single_rows ? shared : 0), int32_t(before[2]),
                           int32_t(before[2] + s.states + uint32_t(shared)),
                           level == kOwn ? tiles.at(kToken, t) : -1, 0});
  }

  // The report list of a node's tile whose members each have one row of query tokens: its length is known.
  template <class Tiles>
  FI_DEVICE int32_t begin_report(Tiles tiles, int32_t t, int32_t number) {
    const int32_t node = tiles.at(kRequest, t), before = tiles.at(kQBegin, t) / c_.group;
    const int32_t at = number + levels_->tokens_begin[node] + before;
    section<int32_t>(a_.layout.reports)[at] = shape_rows(tiles.at(kShape, t)) / c_.group;
    return at;
  }

  FI_DEVICE void write_header(int32_t chunk, const Counts& use, int32_t num_tokens, int32_t reports) {
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
    h.num_nodes = count_.nodes;
    h.num_node_tokens = count_.tokens;
    h.num_reports = reports;
    block_.store(section<PlanHeader>(a_.layout.header), h);
  }

  Block& block_;
  const DevicePlanArgs& a_;
  const PlannerConfig& c_;
  Memory& m_;
  Levels* const levels_;
  NodeTables* const nodes_;
  const NodeCuts* const cuts_;
  GatheredLists* const lists_;
  Collectives<Block, 5> all_;
  Sort sort_;
  BudgetChooser<Block, kShares> budgets_;
  const int thread_;
  int32_t num_tiles_ = 0, longest_ = 0, num_tokens_ = 0;  // query tokens: known to the last thread
  int64_t flat_total_ = 0, flat_cost_ = 0;  // of all tiles without nodes, and of those that this thread made
  uint32_t found_ = 0;
  bool made_ = false;  // the requests' tiles lie in shared memory
  // Every thread has read the one request whose tile it makes.
  bool own_only_ = false;
  OwnRequest own_{};
  LevelCounts count_{};
};

}  // namespace fi
