// SPDX-License-Identifier: Apache-2.0
// The plan of a step of many tickets in which no request's tile is cut, only those of nodes may be: hardly
// anything is divided on the way, and what a thread knows of its item stays in registers. That nothing is cut
// is believed until it is looked at beside the sort: without nodes, one warp works the budget out meanwhile.
// By one block.
#pragma once
#include "device_budget.h"
#include "device_items.h"
#include "phases.h"

namespace fi {

// What the plan lists of members, gathered before it is written a line at a time: words of many members, each
// to a sector of its own, would be what a launch ends with.
struct alignas(16) GatheredLists {
  static constexpr int32_t kWords = 2560;
  int32_t node_tokens[kWords], reports[kWords], parts[kWords];
  MemberRanks ranks;
};

template <class Block, class Tiles, bool kShares>
class UncutPlanner {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;
  using Sort = BucketSort<Block, kSortBits>;
  using Budgets = BudgetChooser<Block, kShares>;
  using Items = ItemEmitter<Block, Tiles, kShares>;

  // What the plan's header says of it.
  struct Use {
    int32_t items, units, parts, rows, reports;
  };

  // levels, nodes: null unless kShares. The requests' tiles are there, those of nodes are made here.
  FI_DEVICE UncutPlanner(Block& block, const DevicePlanArgs& args, Collectives<Block, 5>& all, Sort& sort,
                         Budgets& budgets, const Levels* levels, NodeTables* nodes, const NodeCuts* cuts,
                         GatheredLists* lists, const LevelCounts& count, Tiles tiles, int32_t flat_tiles)
      : block_(block),
        a_(args),
        c_(args.config),
        all_(all),
        sort_(sort),
        budgets_(budgets),
        levels_(levels),
        nodes_(nodes),
        cuts_(cuts),
        lists_(lists),
        count_(count),
        tiles_(tiles),
        flat_tiles_(flat_tiles),
        num_tiles_(flat_tiles + count.tiles),
        thread_(block.thread()),
        warp_(thread_ / kWarp) {}

  // Of steps whose nodes are cut already, if they have any.
  static FI_DEVICE bool applies(const DevicePlanArgs& args, const LevelCounts& count, int32_t flat_tiles) {
    if (flat_tiles + count.tiles > kThreads) return false;
    return count.nodes == 0 || (count.single_rows && count.cuts && args.config.invariant_grid == 0 &&
                                count.tiles + count.tokens <= GatheredLists::kWords);
  }

  // total: the scaled cost of all tiles without nodes. nodes: NodeEmitter where there are any. header(use):
  // called by the last thread. Returns false where the step has to be planned in another way: the requests'
  // tiles are as they were, and the sort is empty behind the next barrier.
  template <class Nodes, class Header>
  FI_DEVICE bool run(int64_t total, Nodes nodes, Header header) {
    const bool shares = kShares && count_.nodes > 0;
    // By a warp that mostly has no item.
    if (warp_ == kWarps - 1 && !shares) budgets_.set_chunks(ideal_budget(c_, total, a_.cost_shift));
    int32_t items = num_tiles_, number = 0, chunk = 0;  // number: of a node's tile among those of all nodes
    if (shares) {
      const auto more = uint32_t(cuts_->more);
      if (more > uint32_t(kThreads - items)) return false;
      items += int32_t(more);
      // Those of requests have nothing to look for.
      if (thread_ >= flat_tiles_) find_tile(thread_ - flat_tiles_, number, chunk);
    }
    const bool valid = thread_ < items;
    Tile tile{};
    Split split{0, 1, 0};
    if (thread_ < flat_tiles_) {
      tile = request_tile();
      split.chunk_len = tile.kv_end - tile.kv_begin;
    } else if (shares && valid) {
      tile = make_node_tile(number);
      split = {cuts_->chunk_len[tile.request], cuts_->chunks(*levels_, tile.request), 1};
    }
    WorkItem item{};
    if (valid) item = make_item(c_, tile, split, chunk, -1, -1);
    uint32_t before[3] = {0, 0, 0}, use[3] = {0, 0, 0};  // units, parts, partial rows
    if (tile.level == kOwn) {
      before[0] = 1;
      before[1] = uint32_t(1 + chunks_above(tile.request));
    }
    if (valid && tile.level != kFlat) before[2] = tile.q_rows;
    if constexpr (kShares)
      if (shares) nodes.count_members((items + kWarp - 1) / kWarp, &lists_->ranks);
    all_.post(3, block_.warp_max(uint32_t(item.cost)));
    if (shares)
      all_.exclusive_scan(before, use);
    else
      all_.meet();
    FI_PHASE(block_, "composed");
    // The longest item of a tile that is cut is one of the first ones.
    const int shift = sort_shift(c_, block_.warp_max(uint32_t(all_.posted(3))));
    const PlanCapacity& cap = a_.capacity;
    if (items > cap.items || int32_t(use[0]) > cap.units || int32_t(use[1]) > cap.parts ||
        int32_t(use[2]) > cap.partial_rows || (shares && int32_t(use[1]) > GatheredLists::kWords))
      return false;
    if constexpr (kShares)
      if (shares) {
        keep(tile, split, chunk, number, before, item);
        nodes.add_members();
      }
    const bool cut = thread_ < flat_tiles_ && split.chunk_len > budgets_.last_warps_chunk(tile.kind);
    const typename Sort::Key key = sort_.key(sort_bucket(c_, item, shift), valid);
    sort_.count(key, true);
    all_.post(0, warp_sum64(block_, item.cost));
    all_.post(1, block_.ballot(cut) != 0);
    if (c_.overlaps) all_.post(2, count_bits(block_.ballot(valid && is_tall(item))));
    all_.meet();
    FI_PHASE(block_, "items counted");
    if (block_.ballot(all_.posted(1) != 0)) {
      sort_.clear();
      if constexpr (kShares)
        if (shares) {
          nodes.clear_members();
          block_.sync();
        }
      return false;
    }
    int32_t end = 0;
    if (warp_ == 0)
      sort_.scan_positions();
    else if (warp_ == kWarps - 1)
      end = Items::find_ends(block_, c_, count_.nodes, all_.posted(0), shift);
    if constexpr (kShares)
      if (shares) beside(nodes);
    block_.sync();
    if (warp_ == kWarps - 1) {
      if (thread_ == kThreads - 1)
        header(Use{items, int32_t(use[0]), int32_t(use[1]), int32_t(use[2]), count_.tiles + count_.tokens});
      block_.sync_warp();
      Items::write_ends(block_, a_, sort_, items, end);
    }
    if constexpr (kShares)
      if (shares && warp_ < kWarps - 1) write_lists(nodes.lists(), int32_t(use[1]));
    const uint32_t at = sort_.place(key);
    const Overlap order = Items::order_of(block_, c_, count_.nodes, items, all_.posted(2));
    if (!valid) return true;
    block_.store(section<WorkItem>(a_.layout.items) + order.place(int32_t(at)), item);
    return true;
  }

 private:
  template <class T>
  FI_DEVICE T* section(int64_t offset) const {
    return reinterpret_cast<T*>(a_.plan + offset);
  }

  // Of rows, by query heads per KV head: with single rows a power of two.
  FI_DEVICE int32_t of_group(int32_t rows) const { return rows >> lowest_bit(uint32_t(c_.group)); }

  // Of a composed request: items of the nodes above.
  FI_DEVICE int32_t chunks_above(int32_t request) const {
    return kShares ? cuts_->path_chunks[levels_->leaf[request]] : 0;
  }

  // Item `i` among those of all nodes: which of their tiles it belongs to, and which chunk it is.
  FI_DEVICE void find_tile(int32_t i, int32_t& number, int32_t& chunk) const {
    int32_t node = -1, at = 0;  // the last node that is cut and begins before it, and how far
    int32_t more = 0;           // items than tiles, up to a node
    number = i;
    FI_ROLL
    for (int32_t word = 0; word * kWarp < count_.nodes; ++word) {
      FI_ROLL
      for (uint32_t left = cuts_->cut[word]; left; left &= left - 1) {
        const int32_t j = word * kWarp + lowest_bit(left), first = levels_->tile[j], extra = cuts_->extra[j];
        const int32_t behind = i - first - more;
        more += extra;
        if (behind < 0) continue;
        node = j;
        at = behind;
        number = i - more;
      }
    }
    if (node < 0) return;
    const int32_t first = levels_->tile[node], chunks = cuts_->chunks(*levels_, node);
    // Behind the node's items there are fewer tiles than items before.
    const int32_t end = node + 1 < count_.nodes ? levels_->tile[node + 1] : count_.tiles;
    if (number >= end) return;
    const auto tile = int32_t(uint32_t(at) / uint32_t(chunks));
    number = first + tile;
    chunk = at - tile * chunks;
  }

  FI_DEVICE Tile request_tile() const {
    Tile tile = tile_at<false>(tiles_, thread_);  // what is composed is seen below
    if (kShares && count_.nodes > 0 && tile.request < kForestRequests) {
      const int32_t leaf = levels_->leaf[tile.request];
      if (leaf >= 0) tile = own_tile(tile, levels_->end[leaf]);
    }
    return tile;
  }

  FI_DEVICE Tile make_node_tile(int32_t number) const {
    const int32_t j = find_owner(levels_->tile, count_.nodes, count_.tiles, number);
    return node_tile(j, levels_->begin(j), levels_->end[j], levels_->kind(j), levels_->tokens[j] * c_.group,
                     number - levels_->tile[j]);
  }

  // What is known when items are numbered, for the thread's item and for who reads of its tile or node.
  FI_DEVICE void keep(const Tile& tile, const Split& split, int32_t chunk, int32_t number,
                      const uint32_t (&before)[3], WorkItem& item) {
    const auto row = int32_t(before[2]);
    if (thread_ < flat_tiles_) {
      const bool own = tile.level == kOwn;
      if (own) {
        item.partial = row;
        item.unit = int32_t(before[0]);
        lists_->parts[int32_t(before[1]) + chunks_above(tile.request)] = row;
      }
      tiles_.at(kUnit, thread_) = item.unit;
      tiles_.at(kFirstPart, thread_) = int32_t(before[1]);
    } else if (item.flags & kPrefix) {
      const int32_t j = tile.request;
      item.unit = list_of(number, j, tile.q_begin);
      // The rows of a node lie together for each of its chunks, not for each of its tiles.
      const int32_t first = row - tile.q_begin * split.chunks - chunk * tile.q_rows;
      item.partial = first + chunk * levels_->tokens[j] * c_.group + tile.q_begin;
      if (tile.q_begin > 0 || chunk > 0) return;
      tiles_.at(kChunks, flat_tiles_ + number) = split.chunks;
      tiles_.at(kFirstRow, flat_tiles_ + number) = first;
      nodes_->path_chunks[j] = cuts_->path_chunks[j];
    }
  }

  // Where the report list of a node's tile lies: behind those before, each with its length.
  FI_DEVICE int32_t list_of(int32_t number, int32_t node, int32_t q_begin) const {
    return number + levels_->tokens_begin[node] + of_group(q_begin);
  }

  // What only writes, a warp a task: units and lists of reports a tile a lane, then nodes, then members.
  template <class Nodes>
  FI_DEVICE void beside(Nodes nodes) {
    // Neither the first warp nor the last one has time, unless there are no others.
    constexpr int kBusy = kWarps > 2 ? 1 : 0, kFree = kWarps - 2 * kBusy;
    if (kBusy && (warp_ == 0 || warp_ == kWarps - 1)) return;
    const int32_t tiles = (num_tiles_ + kWarp - 1) / kWarp, lists = (count_.nodes + kWarp - 1) / kWarp;
    int32_t task = warp_ - kBusy;
    FI_ROLL
    for (; task < tiles + lists; task += kFree) {
      const int32_t i = (task < tiles ? task : task - tiles) * kWarp + thread_ % kWarp;
      if (task >= tiles) {
        if (i < count_.nodes) nodes.put_node(i);
      } else if (i < flat_tiles_) {
        put_unit(i);
      } else if (i < num_tiles_) {
        put_report(i - flat_tiles_);
      }
    }
    nodes.put_ranked_rows({lists_->node_tokens, lists_->reports, lists_->parts}, lists_->ranks,
                          task - tiles - lists, kFree);
  }

  FI_DEVICE void put_unit(int32_t t) {
    const int32_t unit = tiles_.at(kUnit, t);
    if (unit < 0) return;
    const int32_t request = tiles_.at(kRequest, t), parts = 1 + chunks_above(request);
    const int32_t first = tiles_.at(kFirstPart, t);
    block_.store(section<MergeUnit>(a_.layout.units) + unit,
                 MergeUnit{request, tiles_.at(kQBegin, t), shape_rows(tiles_.at(kShape, t)), parts, first,
                           first + parts, tiles_.at(kToken, t), 0});
  }

  // The length of the list.
  FI_DEVICE void put_report(int32_t number) {
    const Tile tile = make_node_tile(number);
    lists_->reports[list_of(number, tile.request, tile.q_begin)] = of_group(tile.q_rows);
  }

  // By all warps but the last one, which writes the header: lines of all lists, one after the other.
  FI_DEVICE void write_lists(const MemberLists& to, int32_t num_parts) {
    constexpr int kWriters = kThreads - kWarp, kWords = 4;
    static_assert(kWriters > 0);
    struct alignas(16) Line {
      int32_t word[kWords];
    };
    const int32_t num_reports = count_.tiles + count_.tokens;
    const int32_t reports = (count_.tokens + kWords - 1) / kWords;
    const int32_t parts = reports + (num_reports + kWords - 1) / kWords;
    const int32_t end = parts + (num_parts + kWords - 1) / kWords;
    FI_ROLL
    for (int32_t line = thread_; line < end; line += kWriters) {
      const int32_t* from = lists_->node_tokens;
      int32_t* list = to.node_tokens;
      int32_t words = count_.tokens, first = 0;
      if (line >= reports) {
        from = lists_->reports;
        list = to.reports;
        words = num_reports;
        first = reports;
      }
      if (line >= parts) {
        from = lists_->parts;
        list = to.parts;
        words = num_parts;
        first = parts;
      }
      const int32_t at = kWords * (line - first);
      if (at + kWords <= words) {
        *reinterpret_cast<Line*>(list + at) = *reinterpret_cast<const Line*>(from + at);
      } else {
        FI_ROLL
        for (int32_t i = at; i < words; ++i) list[i] = from[i];
      }
    }
  }

  Block& block_;
  const DevicePlanArgs& a_;
  const PlannerConfig& c_;
  Collectives<Block, 5>& all_;
  Sort& sort_;
  Budgets& budgets_;
  const Levels* const levels_;
  NodeTables* const nodes_;
  const NodeCuts* const cuts_;
  GatheredLists* const lists_;
  const LevelCounts& count_;
  const Tiles tiles_;
  const int32_t flat_tiles_, num_tiles_;
  const int thread_, warp_;
};

}  // namespace fi
