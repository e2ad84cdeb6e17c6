// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the mma.sync template, and the shared memory that follows from them.
#pragma once
#include <cstdint>

#include "ptx/float8.cuh"

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

// Whether the target is sm_90a: known to the host's half of a compilation too, which counts shared memory.
#if !defined(FI_SM90A)
#define FI_SM90A 0
#endif
#if defined(__CUDA_ARCH__) && FI_SM90A != defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "FI_SM90A: expected 1 for sm_90a, and 0 for all other targets"
#endif
// Whether warpgroups multiply tiles of 128 rows (fi_backend/core/kernel_choice.py).
#if !defined(FI_WGMMA)
#error "FI_WGMMA: expected 0 or 1"
#endif
// Where registers can be moved between warpgroups, consumers take most of those of the others.
inline constexpr bool kMovesRegisters = FI_SM90A;
inline constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;

inline constexpr int kRowBytes = 128;  // a swizzled row
inline constexpr int kWideRows = 64;   // rows of one operand of wgmma
inline constexpr int kWidenedTiles = 2;
inline constexpr int kMaxStages = 8;
inline constexpr int kSlots = 4;  // work items between the scheduler and the slowest consumer
// Shared memory that a block of the target may have: 227 KiB on sm_90 and sm_100, 163 on sm_80, 99 on the
// others.
#if !defined(FI_SHARED_KIB)
#define FI_SHARED_KIB 227
#endif
inline constexpr int kMaxSharedBytes = FI_SHARED_KIB * 1024;

// Rows of a warp's state that are joined at once, which take 64 KiB for heads of 128; half of them where a
// pipeline stage more is worth more.
inline constexpr int kStateRows = FI_SHARED_KIB >= 227 ? 16 : 8;
// Tiles whose rows the guide has found and no producer has fetched.
inline constexpr int kRowTiles = kStateRows == 8 ? 6 : 4;

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
  static constexpr bool kFp8 = sizeof(TKV) == 1, kHalfWeights = kFp8;
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0 && kHeadDim <= 256 && kHeadDimV <= 256);

  static constexpr int kKChunks = kHeadDim * int(sizeof(TKV)) / 16;  // 16-byte chunks of a row of K
  static constexpr int kVChunks = kHeadDimV * int(sizeof(TKV)) / 16;
  // Heads wider than 128 share the output columns of a row between two warps, which both compute its logits.
  // Where registers can be moved, keys alone may be wider.
  static constexpr int kColumnWarps =
      (kMovesRegisters ? kHeadDimV : max_of(kHeadDim, kHeadDimV)) > 128 ? 2 : 1;
  static constexpr int kMaxGroups = kConsumerWarps / kColumnWarps;  // of 16 rows
  static constexpr int kWarpColumns = kHeadDimV / kColumnWarps;
  static_assert(kWarpColumns % 16 == 0);
  // Tiles of 128 rows are multiplied by warpgroups (sm90/wide.cuh), those of fp8 caches once they have been
  // widened in shared memory (sm90/widened.cuh), for which heads wider than 128 leave no room.
  static constexpr bool kWgmma = FI_WGMMA, kWidens = kWgmma && kFp8;
  static_assert(!kWgmma || kMovesRegisters);
  static_assert(!kWidens || max_of(kHeadDim, kHeadDimV) <= 128);
  // Fragments of the queries stay in registers where the output leaves room for them.
  static constexpr bool kQInRegisters = kMovesRegisters && kHeadDim <= 128;
  // Otherwise wgmma reads them from shared memory, 64 rows as one operand (WideHeads).
  static constexpr bool kReadsQueries = kWgmma && !kQInRegisters;

  static_assert(!(kWgmma && kInvariant) || (kQInRegisters && kColumnWarps == 1 && !kFp8),
                "states of grid chunks lie in slices without queries, and fp8 tiles give other bits");

  // A slice for the warps of 16 rows: queries on the way in; states and results on the way out.
  static constexpr int kSliceBytes =
      max_of(tile_bytes(16, kHeadDim * 2),
             kColumnWarps* max_of(tile_bytes(16, kWarpColumns * 2), kStateRows * kWarpColumns * 4));
  static constexpr int kQBytes =
      max_of(kMaxGroups * kSliceBytes, kReadsQueries ? 2 * tile_bytes(kWideRows, kHeadDim * 2) : 0);
  static constexpr int kControlBytes = kStateRows == 8 ? 1536 : 2048;

  // Keys of one pipeline stage and of one softmax update: 64, or 32 where shared memory is short.
  static constexpr int stage_bytes(int keys) {
    return tile_bytes(keys, kKChunks * 16) + tile_bytes(keys, kVChunks * 16);
  }
  static constexpr int widened_bytes(int keys) {
    return kWidens ? kWidenedTiles * (tile_bytes(keys, kHeadDim * 2) + tile_bytes(keys, kHeadDimV * 2)) : 0;
  }
  static constexpr int fixed_bytes(int keys) {
    return kQBytes + widened_bytes(keys) + kControlBytes + kRowTiles * keys * 4;
  }
  static constexpr int stages(int keys) {
    return min_of(kMaxStages, (kMaxSharedBytes - fixed_bytes(keys)) / stage_bytes(keys));
  }
  // Full barriers tell two laps of the ring apart, and a warp looks at most as many tiles ahead as share a
  // row. wgmma reads two tiles at once.
  static constexpr int kLeastStages = kWgmma ? 3 : 2;
  static constexpr int kKvTile = 2 * stages(64) >= kMaxGroups && stages(64) >= kLeastStages ? 64 : 32;
  static constexpr int kStages = stages(kKvTile);
  static_assert(kStages >= kLeastStages && 2 * kStages >= kMaxGroups, "too little shared memory");
  static constexpr int kKBytes = tile_bytes(kKvTile, kKChunks * 16);
  static constexpr int kStageBytes = stage_bytes(kKvTile);
  static constexpr int kWidenedBytes = widened_bytes(kKvTile);
  static constexpr int kRingAt = kQBytes + kWidenedBytes;  // where the stages begin
  static constexpr int kSharedBytes = fixed_bytes(kKvTile) + kStages * kStageBytes;
};

// The instance as tiles of 128 rows see it whose queries wgmma reads from shared memory: a warp holds 16 rows
// with all their columns.
template <class Base>
struct WideHeads : Base {
  static_assert(Base::kReadsQueries);
  static constexpr int kColumnWarps = 1, kMaxGroups = kConsumerWarps, kWarpColumns = Base::kHeadDimV;
};
template <class Traits>
inline constexpr bool kWideHeads = false;
template <class Base>
inline constexpr bool kWideHeads<WideHeads<Base>> = true;
inline constexpr int kWideBarrier = 9;  // of all consumers, in tiles of wide heads and widened tiles

// The instance as tiles of 128 rows see it that read widened tiles: caches of the queries' type.
template <class Base>
struct WidenedTiles : Base {
  static_assert(Base::kWidens);
  using TKV = typename Base::T;
  using Narrow = typename Base::TKV;
  static constexpr bool kFp8 = false;
  static constexpr int kNarrowKBytes = Base::kKBytes;
  static constexpr int kKBytes = tile_bytes(Base::kKvTile, Base::kHeadDim * 2);
  static constexpr int kBufferBytes = Base::kWidenedBytes / kWidenedTiles;
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows.
__device__ __forceinline__ uint32_t swizzled(int rows, int row, int chunk) {
  return uint32_t((chunk >> 3) * rows * kRowBytes + row * kRowBytes + (((chunk & 7) ^ (row & 7)) << 4));
}

}  // namespace fi::sm80
