// SPDX-License-Identifier: Apache-2.0
// The items of a plan whose tiles are cut, in the order in which CTAs draw them, and their parts; by one
// block.
#pragma once
#include "device_nodes.h"

namespace fi {

template <class Block, class Tiles, bool kShares>
class ItemEmitter {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;
  using Sort = BucketSort<Block, kSortBits>;
  using Collective = Collectives<Block, 5>;

  // levels, nodes: null unless kShares. The nodes' tiles are the last ones.
  FI_DEVICE ItemEmitter(Block& block, const DevicePlanArgs& args, Collective& all, Sort& sort,
                        const Levels* levels, const NodeTables* nodes, const LevelCounts& count, Tiles tiles,
                        int32_t num_tiles)
      : block_(block),
        a_(args),
        c_(args.config),
        all_(all),
        sort_(sort),
        levels_(levels),
        nodes_(nodes),
        count_(count),
        tiles_(tiles),
        num_tiles_(num_tiles),
        thread_(block.thread()),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp) {}

  // A round of kThreads items after the other; warps without an item skip what whole warps do. beside(task,
  // step, end): called by whole warps, does every step-th of some tasks from one on, before `end`.
  template <class Beside>
  FI_DEVICE void run(int32_t num_items, int shift, Beside beside) {
    // Warps without an item begin with the tasks; when items are counted and one warp places buckets and the
    // last one divides, the others do the rest.
    constexpr int kLast = kWarps > 2 ? kWarps - 1 : kWarps;
    const int busy = num_items < kThreads ? (num_items + kWarp - 1) / kWarp : kWarps, idle = kWarps - busy;
    ItemKey k;
    int32_t end = 0;
    FI_ROLL
    for (bool counted = false;; counted = true) {
      int task = counted ? idle + warp_ - 1 : warp_ - busy;
      if (!counted) {
        int64_t load = 0;
        int32_t tall = 0;
        FI_ROLL
        for (int32_t base = 0; base + warp_ * kWarp < num_items; base += kThreads) {
          const ItemKey next = item_key(base + thread_, num_items, shift);
          sort_.count(next.key, base == 0);
          load += next.item.cost;
          if (c_.overlaps) tall += count_bits(block_.ballot(next.key.valid && is_tall(next.item)));
          if (base == 0) k = next;
        }
        all_.post(0, warp_sum64(block_, load));
        all_.post(1, tall);
      } else if (warp_ == 0) {
        sort_.scan_positions();
        task = -1;
      } else if (warp_ == kWarps - 1) {
        end = find_ends(block_, c_, count_.nodes, all_.posted(0), shift);
        if (kLast < kWarps) task = -1;
      }
      if (task >= 0) beside(task, counted ? kLast - 1 : kWarps, counted ? kMaxInt32 : idle);
      if (counted) break;
      all_.meet();
    }
    block_.sync();
    if (warp_ == kWarps - 1) write_ends(block_, a_, sort_, num_items, end);
    const Overlap order = order_of(block_, c_, count_.nodes, num_items, all_.posted(1));
    FI_ROLL
    for (int32_t base = 0;; base += kThreads) {
      const uint32_t at = sort_.place(k.key);
      if (base + thread_ < num_items) write_item(base + thread_, k, order.place(int32_t(at)));
      const int32_t next = base + kThreads;
      if (next >= num_items) return;
      k = {};
      if (next + warp_ * kWarp < num_items) k = item_key(next + thread_, num_items, shift);
      sort_.next_round(k.key);
    }
  }

  // From which bucket on heads are bundled, by one warp, a lane a size; loads: what the warps' items cost.
  static FI_DEVICE int32_t find_ends(Block& block, const PlannerConfig& config, int32_t num_nodes,
                                     int64_t loads, int shift) {
    const int lane = block.thread() % kWarp;
    const int64_t load = warp_sum64(block, loads);
    return lane < kBundleSizes ? first_bundled_bucket(config, num_nodes, load, shift, lane + 1) : 0;
  }

  // How items are drawn, by whole warps; tall: how many of each warp's items are.
  static FI_DEVICE Overlap order_of(Block& block, const PlannerConfig& config, int32_t num_nodes,
                                    int32_t num_items, int64_t tall) {
    if (!config.overlaps) return {};
    return overlap(config, num_nodes, num_items, int32_t(warp_sum64(block, tall)));
  }

  // By the warp that has written the header, when positions are scanned, while buckets still say where they
  // begin.
  static FI_DEVICE void write_ends(Block& block, const DevicePlanArgs& args, const Sort& sort,
                                   int32_t num_items, int32_t end) {
    const int lane = block.thread() % kWarp;
    if (lane < kBundleSizes)
      reinterpret_cast<PlanHeader*>(args.plan + args.layout.header)->bundled[lane] =
          end < kSortBuckets ? num_items - int32_t(sort.position(end)) : 0;
  }

 private:
  template <class T>
  FI_DEVICE T* section(int64_t offset) const {
    return reinterpret_cast<T*>(a_.plan + offset);
  }

  struct ItemKey {
    int32_t tile = 0;
    WorkItem item{};
    typename Sort::Key key;
  };

  FI_DEVICE ItemKey item_key(int32_t item, int32_t num_items, int shift) {
    ItemKey k;
    int bucket = 0;
    if (item < num_items) {
      k.tile = find_owner(&tiles_.at(kFirstItem, 0), num_tiles_, num_items, item);
      k.item = item_of(item, k.tile);
      bucket = sort_bucket(c_, k.item, shift);
    }
    k.key = sort_.key(bucket, item < num_items);
    return k;
  }

  FI_DEVICE WorkItem item_of(int32_t item, int32_t t) const {
    const Tile tile = tile_at<kShares>(tiles_, t);
    const Split split{tiles_.at(kChunkLen, t), tiles_.at(kChunks, t), 0};
    int32_t first_row = tiles_.at(kFirstRow, t), chunk_rows = 0;
    if (tile.level == kNode) {
      first_row =
          tiles_.at(kFirstRow, num_tiles_ - count_.tiles + levels_->tile[tile.request]) + tile.q_begin;
      chunk_rows = levels_->tokens[tile.request] * c_.group;
    }
    return make_item(c_, tile, split, item - tiles_.at(kFirstItem, t), tiles_.at(kUnit, t), first_row,
                     chunk_rows);
  }

  FI_DEVICE void write_item(int32_t item, const ItemKey& k, int32_t at) {
    const WorkItem& w = k.item;
    const int32_t t = k.tile;
    block_.store(section<WorkItem>(a_.layout.items) + at, w);
    if (w.unit < 0 || w.flags & kPrefix) return;
    const int32_t grid = c_.invariant_grid;
    const bool many = grid > 0 && !(w.flags & kFirstChunk);
    const int32_t count = many ? int32_t(ceil_div32(uint32_t(w.kv_end - w.kv_begin), uint32_t(grid))) : 1;
    const Split split{tiles_.at(kChunkLen, t), tiles_.at(kChunks, t), 0};
    const uint32_t before = states_before(c_, split, item - tiles_.at(kFirstItem, t));
    int32_t* parts = section<int32_t>(a_.layout.parts) + tiles_.at(kFirstPart, t) + before;
    if (kShares && shape_level(tiles_.at(kShape, t)) == kOwn)
      parts += nodes_->path_chunks[levels_->leaf[w.request]];
    FI_ROLL
    for (int32_t i = 0; i < count; ++i) parts[i] = w.partial + i * w.q_rows;
  }

  Block& block_;
  const DevicePlanArgs& a_;
  const PlannerConfig& c_;
  Collective& all_;
  Sort& sort_;
  const Levels* const levels_;
  const NodeTables* const nodes_;
  const LevelCounts& count_;
  const Tiles tiles_;
  const int32_t num_tiles_;
  const int thread_, warp_, lane_;
};

}  // namespace fi
