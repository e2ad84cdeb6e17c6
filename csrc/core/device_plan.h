// SPDX-License-Identifier: Apache-2.0
// The planner as one thread block: the bytes of planner.cc from lengths that only the device knows. `Block`
// is a CUDA thread block or its emulation on the host (collectives.h).
#pragma once
#include "bucket_sort.h"
#include "collectives.h"
#include "plan_rules.h"

namespace fi {

// Larger steps take their tables from the workspace instead of shared memory.
inline constexpr int32_t kSharedTiles = 1024;
inline constexpr int32_t kSharedRequests = 1024;

enum TileField {
  kRequest,
  kQBegin,
  kKvBegin,
  kKvEnd,
  kShape,
  kChunkLen,
  kChunks,
  kFirstItem,
  kUnit,
  kFirstPart,
  kFirstRow,
  kTileFields
};

struct DevicePlanArgs {
  PlannerConfig config;
  PlanCapacity capacity;
  PlanLayout layout;
  int32_t cost_shift;
  int32_t tile_capacity;
  int32_t num_requests;
  const int32_t* qo_indptr;  // [num_requests + 1]
  const int32_t* kv_lens;    // [num_requests]
  uint8_t* plan;             // aligned to 16 bytes
  int32_t* workspace;        // workspace_words(); null when that is 0
};

inline int64_t workspace_words(const PlannerConfig& config) {
  const int64_t tiles = tile_capacity(config);
  if (config.limits.max_requests <= kSharedRequests && tiles <= kSharedTiles) return 0;
  return config.limits.max_requests + 1 + kTileFields * tiles;
}

template <int kThreads>
struct DevicePlanMemory {
  static constexpr int kWarps = kThreads / kWarp;
  CollectiveSlots<kWarps, 4> slots;
  int64_t ideal;
  int64_t load[kWarps], largest[kWarps], large[kWarps];
  int32_t chunk[kNumCandidates][kNumTiles];  // KV tokens of an item, by candidate budget and tile
  int32_t choice;
  BucketSortMemory<kWarps, kSortBuckets> sort;
  int32_t tile_begin[kSharedRequests + 1];
  int32_t tiles[kTileFields * kSharedTiles];
};

struct SharedTiles {
  int32_t* base;
  FI_DEVICE int32_t& at(TileField field, int32_t tile) const { return base[field * kSharedTiles + tile]; }
};

struct GlobalTiles {
  int32_t* base;
  int32_t capacity;
  FI_DEVICE int32_t& at(TileField field, int32_t tile) const {
    return base[field * int64_t(capacity) + tile];
  }
};

// The last of `count` > 0 entries that is at most `value`; the first one is.
FI_DEVICE int32_t find_last(const int32_t* sorted, int32_t count, int32_t value) {
  int32_t low = 0;
  while (count > 1) {
    const int32_t half = count / 2;
    if (sorted[low + half] <= value) low += half;
    count -= half;
  }
  return low;
}

template <class Block>
class DevicePlanner {
 public:
  static constexpr int kThreads = Block::kThreads, kWarps = kThreads / kWarp;
  static constexpr int kCandidateThreads = kThreads / kNumCandidates;
  static_assert(kCandidateThreads % kWarp == 0 && kWarps <= kWarp);
  using Memory = DevicePlanMemory<kThreads>;
  using Sort = BucketSort<Block, kSortBits>;

  FI_DEVICE DevicePlanner(Block& block, const DevicePlanArgs& args, Memory& memory)
      : block_(block),
        a_(args),
        c_(args.config),
        m_(memory),
        all_(block, memory.slots),
        sort_(block, memory.sort),
        thread_(block.thread()),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp) {}

  FI_DEVICE void run() {
    clear();
    int32_t* tile_begin = a_.num_requests <= kSharedRequests ? m_.tile_begin : a_.workspace;
    const uint32_t found = read_requests(tile_begin);
    if (found & ~kSeveralTiles) {
      if (thread_ == 0) {
        counters()[kFaults] = int32_t(found & ~kSeveralTiles);
        write_header(0, {}, 0);
      }
      return;
    }
    // Two copies of the same code, so that the one for most steps addresses shared memory as such.
    if (a_.num_requests <= kSharedRequests && num_tiles_ <= kSharedTiles)
      plan(static_cast<const int32_t*>(m_.tile_begin), SharedTiles{m_.tiles}, found & kSeveralTiles);
    else
      plan(static_cast<const int32_t*>(tile_begin),
           GlobalTiles{a_.workspace + c_.limits.max_requests + 1, a_.tile_capacity}, found & kSeveralTiles);
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
    for (int32_t i = thread_; i < a_.capacity.counters; i += kThreads) counters()[i] = 0;
    sort_.clear();
  }

  // Counts the tiles, copies the lengths, finds the longest; returns PlannerFault and kSeveralTiles.
  FI_DEVICE uint32_t read_requests(int32_t* tile_begin) {
    auto* bounds = section<int32_t>(a_.layout.kv_len_bounds);
    const int32_t requests = a_.num_requests;
    uint32_t found = 0, carry = 0;
    int32_t longest = 0;
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
    const int choice = choose_budget(tiles, total);
    Counts use;
    const uint32_t greatest = split_tiles(tiles, choice, use);
    if (thread_ == kThreads - 1)
      write_header(m_.chunk[choice][0], use, a_.qo_indptr[a_.num_requests] - a_.qo_indptr[0]);
    emit_items(tiles, int32_t(use[0]), sort_shift(greatest));
  }

  template <class Tiles>
  FI_DEVICE int64_t make_tiles(const int32_t* tile_begin, Tiles tiles, bool several_tiles) {
    int64_t total = 0;
    const auto make = [&](int32_t request, int32_t tile, int32_t number) {
      const int32_t q_len = a_.qo_indptr[request + 1] - a_.qo_indptr[request];
      const int kind = query_tile(c_, int64_t(q_len) * c_.group);
      const Tile t = make_tile(c_, request, q_len, a_.kv_lens[request], kind, number * tile_height(kind));
      tiles.at(kRequest, tile) = t.request;
      tiles.at(kQBegin, tile) = t.q_begin;
      tiles.at(kKvBegin, tile) = t.kv_begin;
      tiles.at(kKvEnd, tile) = t.kv_end;
      tiles.at(kShape, tile) = t.kind | t.q_rows << 8;
      total += scale_cost(tile_cost(c_, kind, t.kv_end - t.kv_begin), a_.cost_shift);
    };
    for (int32_t r = thread_; r < a_.num_requests; r += kThreads)
      if (tile_begin[r + 1] - tile_begin[r] == 1) make(r, tile_begin[r], 0);
    if (several_tiles)
      for (int32_t t = thread_; t < num_tiles_; t += kThreads) {
        const int32_t r = find_last(tile_begin, a_.num_requests, t);
        if (tile_begin[r + 1] - tile_begin[r] > 1) make(r, t, t - tile_begin[r]);
      }
    all_.post(0, warp_sum64(block_, total));
    all_.meet();
    return warp_sum64(block_, all_.posted(0));
  }

  // Fills m_.chunk and returns which candidate to take.
  template <class Tiles>
  FI_DEVICE int choose_budget(Tiles tiles, int64_t total) {
    if (warp_ == 0) {
      const int64_t ideal = ideal_budget(c_, total, a_.cost_shift);
      if (lane_ == 0) m_.ideal = ideal;
      if (lane_ < kNumCandidates * kNumTiles) {
        const int candidate = lane_ / kNumTiles, kind = lane_ % kNumTiles;
        m_.chunk[candidate][kind] = chunk_tokens(c_, kind, candidate_budget(ideal, candidate));
      }
    }
    block_.sync();
    if (has_many_tickets(c_, num_tiles_)) return 0;

    // A quarter of the threads to each candidate.
    constexpr int kGroup = kCandidateThreads / kWarp;
    const int candidate = warp_ / kGroup, first = thread_ % kCandidateThreads;
    const auto share = [&](int32_t t) {
      const int kind = tiles.at(kShape, t) & 0xff;
      return estimate_share(c_, kFlat, kind, tiles.at(kKvEnd, t) - tiles.at(kKvBegin, t),
                            m_.chunk[candidate][kind], a_.cost_shift);
    };
    int64_t load = 0, largest = 0, large = 0;
    for (int32_t t = first; t < num_tiles_; t += kCandidateThreads) {
      const Share s = share(t);
      load += s.items * s.cost;
      largest = s.cost > largest ? s.cost : largest;
    }
    load = warp_sum64(block_, load);
    largest = warp_max64(block_, largest);
    if (lane_ == 0) {
      m_.load[warp_] = load;
      m_.largest[warp_] = largest;
    }
    block_.sync();
    largest = warp_max64(block_, m_.largest[candidate * kGroup + lane_ % kGroup]);
    for (int32_t t = first; t < num_tiles_; t += kCandidateThreads)
      if (const Share s = share(t); is_large(s.cost, largest)) large += s.items;
    large = warp_sum64(block_, large);
    if (lane_ == 0) m_.large[warp_] = large;
    block_.sync();
    if (warp_ == 0) compare_candidates();
    block_.sync();
    return m_.choice;
  }

  // One lane a candidate.
  FI_DEVICE void compare_candidates() {
    constexpr int kGroup = kCandidateThreads / kWarp;
    int64_t time = 0;
    if (lane_ < kNumCandidates) {
      int64_t load = 0, largest = 0, large = 0;
      for (int w = lane_ * kGroup; w < (lane_ + 1) * kGroup; ++w) {
        load += m_.load[w];
        large += m_.large[w];
        largest = m_.largest[w] > largest ? m_.largest[w] : largest;
      }
      time = estimate_time(c_, load, largest, large);
    }
    int choice = 0;
    int64_t best = block_.shuffle(time, 0);
    for (int i = 1; i < kNumCandidates; ++i) {
      const int64_t next = block_.shuffle(time, i);
      if (is_better(next, best)) {
        best = next;
        choice = i;
      }
    }
    if (lane_ == 0) m_.choice = choice;
  }

  // Cuts the tiles, writes the merge units; returns the greatest cost of an item.
  template <class Tiles>
  FI_DEVICE uint32_t split_tiles(Tiles tiles, int choice, Counts& use) {
    const PlanCapacity& cap = a_.capacity;
    for (;;) {
      uint32_t greatest = 0;
      for (uint32_t& n : use) n = 0;
      for (int32_t base = 0; base < num_tiles_; base += kThreads) {
        Counts before = {0, 0, 0, 0}, total;
        const int32_t t = base + thread_;
        Split s{};
        int32_t q_rows = 0;
        if (t < num_tiles_) {
          const int32_t shape = tiles.at(kShape, t), tokens = tiles.at(kKvEnd, t) - tiles.at(kKvBegin, t);
          const int kind = shape & 0xff;
          q_rows = shape >> 8;
          s = split_tile(c_, kFlat, tokens, m_.chunk[choice][kind]);
          const uint32_t cost = uint32_t(saturate32(item_cost(c_, kind, s.chunk_len, s.chunks > 1)));
          greatest = cost > greatest ? cost : greatest;
          const uint64_t rows = uint64_t(s.states) * uint32_t(q_rows);
          before[0] = uint32_t(s.chunks);
          before[1] = s.chunks > 1;
          before[2] = s.states < kSaturated ? s.states : kSaturated;
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
      double_budget(choice);
    }
  }

  template <class Tiles>
  FI_DEVICE void keep_split(Tiles tiles, int32_t t, const Split& s, const Counts& before, int32_t q_rows) {
    tiles.at(kChunkLen, t) = s.chunk_len;
    tiles.at(kChunks, t) = s.chunks;
    tiles.at(kFirstItem, t) = int32_t(before[0]);
    tiles.at(kUnit, t) = int32_t(before[1]);
    tiles.at(kFirstPart, t) = int32_t(before[2]);
    tiles.at(kFirstRow, t) = int32_t(before[3]);
    if (s.chunks > 1 && int32_t(before[1]) < a_.capacity.units)
      section<MergeUnit>(a_.layout.units)[before[1]] = {
          tiles.at(kRequest, t), tiles.at(kQBegin, t),          q_rows, s.chunks,
          int32_t(before[2]),    int32_t(before[2] + s.states), -1,     0};
  }

  FI_DEVICE void double_budget(int choice) {
    if (warp_ == 0) {
      // A second doubling starts from the first one's.
      const int64_t budget = first_doubling_ ? candidate_budget(m_.ideal, choice) : m_.ideal;
      const int64_t doubled = budget < kMaxBudget / 2 ? 2 * budget : kMaxBudget;
      if (lane_ < kNumTiles) m_.chunk[choice][lane_] = chunk_tokens(c_, lane_, doubled);
      block_.sync_warp();
      if (lane_ == 0) m_.ideal = doubled;
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
    const Tile tile{tiles.at(kRequest, t),
                    tiles.at(kQBegin, t),
                    tiles.at(kKvBegin, t),
                    tiles.at(kKvEnd, t),
                    uint8_t(shape),
                    uint16_t(shape >> 8),
                    kFlat};
    const Split split{tiles.at(kChunkLen, t), tiles.at(kChunks, t), 0};
    return make_item(c_, tile, split, item - tiles.at(kFirstItem, t), tiles.at(kUnit, t),
                     tiles.at(kFirstRow, t));
  }

  // A round of kThreads items after the other; warps without an item skip what whole warps do.
  template <class Tiles>
  FI_DEVICE void emit_items(Tiles tiles, int32_t num_items, int shift) {
    ItemKey first;
    for (int32_t base = 0; base + warp_ * kWarp < num_items; base += kThreads) {
      const ItemKey k = item_key(tiles, base + thread_, num_items, shift);
      sort_.count(k.key);
      if (base == 0) first = k;
    }
    sort_.end_counting();
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
    if (w.unit < 0) return;
    const int32_t grid = c_.invariant_grid;
    const bool many = grid > 0 && !(w.flags & kFirstChunk);
    const int32_t count = many ? int32_t(ceil_div32(uint32_t(w.kv_end - w.kv_begin), uint32_t(grid))) : 1;
    const Split split{tiles.at(kChunkLen, t), tiles.at(kChunks, t), 0};
    const uint32_t before = states_before(c_, split, item - tiles.at(kFirstItem, t));
    int32_t* parts = section<int32_t>(a_.layout.parts) + tiles.at(kFirstPart, t) + before;
    for (int32_t i = 0; i < count; ++i) parts[i] = w.partial + i * w.q_rows;
  }

  FI_DEVICE void write_header(int32_t chunk, const Counts& use, int32_t num_tokens) {
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
    *section<PlanHeader>(a_.layout.header) = h;
  }

  Block& block_;
  const DevicePlanArgs& a_;
  const PlannerConfig& c_;
  Memory& m_;
  Collectives<Block, 4> all_;
  Sort sort_;
  const int thread_, warp_, lane_;
  int32_t num_tiles_ = 0, longest_ = 0;
  bool first_doubling_ = true;
};

}  // namespace fi
