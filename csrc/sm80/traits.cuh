// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the mma.sync template, and the shared memory that follows from them.
#pragma once
#include <cstdint>

#include "../ptx/float8.cuh"

namespace fi::sm80 {

// Consumers compute; producers bring KV tiles to where they read them; the guide reads the page table ahead
// of the producers, and the scheduler draws work items ahead of all.
inline constexpr int kConsumerWarps = 8;
inline constexpr int kProducerWarps = 2;
inline constexpr int kConsumers = kConsumerWarps * 32;
inline constexpr int kProducers = kProducerWarps * 32;
inline constexpr int kSchedulerWarp = kConsumerWarps + kProducerWarps;
inline constexpr int kGuideWarp = kSchedulerWarp + 1;
inline constexpr int kThreads = (kGuideWarp + 1) * 32;
static_assert(kThreads == kConsumers + 128, "a whole warpgroup beside the consumers");

// Where registers can be moved between warpgroups (sm_90a), consumers take most of those of the others.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kMovesRegisters = true;
#else
inline constexpr bool kMovesRegisters = false;
#endif
inline constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;

inline constexpr int kKvTile = 64;     // keys of one pipeline stage and of one softmax update
inline constexpr int kRowBytes = 128;  // a swizzled row
inline constexpr int kMaxStages = 8;
inline constexpr int kSlots = 4;     // work items between the scheduler and the slowest consumer
inline constexpr int kRowTiles = 6;  // tiles whose rows the guide has found and no producer has fetched
inline constexpr int kMaxSharedBytes = 227 * 1024;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// A tile of `rows` rows of `bytes` bytes is stored as columns of 128-byte rows whose 16-byte chunks are
// XORed with the row number, so that ldmatrix and cp.async are free of bank conflicts.
constexpr int tile_bytes(int rows, int bytes) { return rows * ceil_div(bytes, kRowBytes) * kRowBytes; }

// T: queries and outputs; TKV: T or an fp8 type.
// kInvariant: partial states at fixed key positions, whatever the chunks (batch-invariant mode).
template <typename T_, typename TKV_, int kHeadDim_, int kHeadDimV_, bool kInvariant_>
struct Traits {
  using T = T_;
  using TKV = TKV_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr bool kInvariant = kInvariant_;
  static constexpr bool kFp8 = sizeof(TKV) == 1;
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0 && kHeadDim <= 256 && kHeadDimV <= 256);

  static constexpr int kKChunks = kHeadDim * int(sizeof(TKV)) / 16;  // 16-byte chunks of a row of K
  static constexpr int kVChunks = kHeadDimV * int(sizeof(TKV)) / 16;
  static constexpr int kKBytes = tile_bytes(kKvTile, kKChunks * 16);
  static constexpr int kVBytes = tile_bytes(kKvTile, kVChunks * 16);
  static constexpr int kStageBytes = kKBytes + kVBytes;

  // Heads wider than 128 share the output columns of a row between two warps, which both compute its logits.
  static constexpr int kColumnWarps = kHeadDimV > 128 ? 2 : 1;
  static constexpr int kMaxGroups = kConsumerWarps / kColumnWarps;  // of 16 rows
  static constexpr int kMaxRows = 16 * kMaxGroups;
  static constexpr int kWarpColumns = kHeadDimV / kColumnWarps;
  static_assert(kWarpColumns % 16 == 0);
  // Fragments of the queries stay in registers where the output leaves room for them.
  static constexpr bool kQInRegisters = kMovesRegisters && kHeadDim <= 128;

  // A slice for each consumer warp: queries on the way in; states and results on the way out.
  static constexpr int kSliceBytes =
      max_of(tile_bytes(16, max_of(kHeadDim, kWarpColumns) * 2), 8 * kWarpColumns * 4);
  static constexpr int kQBytes = kConsumerWarps * kSliceBytes;
  static constexpr int kControlBytes = 1280;
  static constexpr int kFixedBytes = kQBytes + kControlBytes + kRowTiles * kKvTile * 4;
  static constexpr int kStages = min_of(kMaxStages, (kMaxSharedBytes - kFixedBytes) / kStageBytes);
  static_assert(kStages >= 2, "head dimensions too large for two pipeline stages");
  static_assert(2 * kStages >= kMaxGroups, "full barriers tell two laps apart");
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows.
__device__ __forceinline__ uint32_t swizzled(int rows, int row, int chunk) {
  return uint32_t((chunk >> 3) * rows * kRowBytes + row * kRowBytes + (((chunk & 7) ^ (row & 7)) << 4));
}

}  // namespace fi::sm80
