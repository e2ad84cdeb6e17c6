// SPDX-License-Identifier: Apache-2.0
// The tables in which a thread block keeps the query tiles of a plan that it makes.
#pragma once
#include "bucket_sort.h"
#include "collectives.h"
#include "plan_rules.h"

namespace fi {

// Larger steps take their tables from the workspace instead of shared memory.
inline constexpr int32_t kSharedTiles = 1024;
inline constexpr int32_t kSharedTilesOfSharing = 448;  // beside the tables of nodes

enum TileField {
  kRequest,
  kQBegin,
  kKvBegin,
  kKvEnd,
  kShape,
  kToken,  // the first query token of a request
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

inline int64_t all_tile_capacity(const PlannerConfig& config) {
  return tile_capacity(config) + node_tile_capacity(config);
}

inline int64_t workspace_words(const PlannerConfig& config) {
  const int64_t tiles = all_tile_capacity(config);
  const int32_t shared = config.sharing.max_nodes > 0 ? kSharedTilesOfSharing : kSharedTiles;
  if (config.limits.max_requests <= shared && tiles <= shared) return 0;
  return config.limits.max_requests + 1 + kTileFields * tiles;
}

// A tile's kShape.
FI_DEVICE int32_t tile_shape(const Tile& t) {
  return t.kind | int32_t(t.level) << 4 | int32_t(t.q_rows) << 8;
}
FI_DEVICE int shape_kind(int32_t shape) { return shape & 15; }
FI_DEVICE TileLevel shape_level(int32_t shape) { return TileLevel(shape >> 4 & 15); }
FI_DEVICE int32_t shape_rows(int32_t shape) { return shape >> 8; }

// Tile t of a table; kShares: whether it can be of another level than a flat one.
template <bool kShares, class Tiles>
FI_DEVICE Tile tile_at(const Tiles& tiles, int32_t t) {
  const int32_t shape = tiles.at(kShape, t);
  return {tiles.at(kRequest, t),
          tiles.at(kQBegin, t),
          tiles.at(kKvBegin, t),
          tiles.at(kKvEnd, t),
          uint8_t(shape_kind(shape)),
          uint16_t(shape_rows(shape)),
          kShares ? shape_level(shape) : kFlat};
}

template <int kWarps>
struct BudgetMemory {
  int64_t load[kWarps], largest[kWarps], counts[kWarps];
  // KV tokens of an item by query tile, each warp's own copy: by the step's budget and by node_budget().
  int32_t chunk[kWarps][2 * kNumTiles];
  int32_t least[kWarps];  // of the former
};

// kTiles: of requests and nodes, and so of requests.
template <int kThreads, int kTiles>
struct DevicePlanMemory {
  static constexpr int kWarps = kThreads / kWarp;
  CollectiveSlots<kWarps, 5> slots;
  BudgetMemory<kWarps> budget;
  BucketSortMemory<kWarps, kSortBuckets> sort;
  int32_t tile_begin[kTiles + 1];
  int32_t tiles[kTileFields * kTiles];
};

template <int kTiles>
struct SharedTiles {
  int32_t* base;
  FI_DEVICE int32_t& at(TileField field, int32_t tile) const { return base[field * kTiles + tile]; }
};

struct GlobalTiles {
  int32_t* base;
  int32_t capacity;
  FI_DEVICE int32_t& at(TileField field, int32_t tile) const {
    return base[field * int64_t(capacity) + tile];
  }
};

// KV tokens that a tile's rows see.
template <class Tiles>
FI_DEVICE int32_t tile_length(Tiles tiles, int32_t tile) {
  return tiles.at(kKvEnd, tile) - tiles.at(kKvBegin, tile);
}

// The last of `count` > 0 entries that is at most `value`; the first one is.
template <class T>
FI_DEVICE int32_t find_last(const T* sorted, int32_t count, int32_t value) {
  int32_t low = 0;
  while (count > 1) {
    const int32_t half = count / 2;
    if (sorted[low + half] <= value) low += half;
    count -= half;
  }
  return low;
}

// Which of `count` owners has entry `i` of `total`: owner k has those from first[k] on, at least one, so that
// it lies at most as far before k as there are more entries than owners.
FI_DEVICE int32_t find_owner(const int32_t* first, int32_t count, int32_t total, int32_t i) {
  const int32_t more = total - count, from = i > more ? i - more : 0, to = i < count ? i : count - 1;
  return from + find_last(first + from, to - from + 1, i);
}

}  // namespace fi
