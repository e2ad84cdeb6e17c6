// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the mma.sync template, and the shared memory that follows from them.
#pragma once
#include <cstdint>

#include "../ptx/float8.cuh"

namespace fi::sm80 {

// Consumers compute; producers bring KV tiles; the scheduler draws work items ahead of both.
inline constexpr int kConsumerWarps = 8;
inline constexpr int kProducerWarps = 2;
inline constexpr int kConsumers = kConsumerWarps * 32;
inline constexpr int kProducers = kProducerWarps * 32;
inline constexpr int kSchedulerWarp = kConsumerWarps + kProducerWarps;
inline constexpr int kThreads = kConsumers + kProducers + 32;

inline constexpr int kKvTile = 64;     // keys of one pipeline stage and of one softmax update
inline constexpr int kRowBytes = 128;  // a swizzled row
inline constexpr int kMaxStages = 8;
inline constexpr int kSlots = 4;  // work items between the scheduler and the slowest consumer
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kLogitStride = kKvTile + 8;  // floats; keeps the exchange free of bank conflicts

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// A tile of `rows` rows of `bytes` bytes is stored as columns of 128-byte rows whose 16-byte chunks are
// XORed with the row number, so that ldmatrix and cp.async are free of bank conflicts.
constexpr int tile_bytes(int rows, int bytes) { return rows * ceil_div(bytes, kRowBytes) * kRowBytes; }

// T: queries and outputs; TKV: T or an fp8 type. kMaxRows: the tallest query tile that plans may hold.
// kInvariant: partial states at fixed key positions, whatever the chunks (batch-invariant mode).
template <typename T_, typename TKV_, int kHeadDim_, int kHeadDimV_, int kMaxRows_, bool kInvariant_>
struct Traits {
  using T = T_;
  using TKV = TKV_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kMaxRows = kMaxRows_;
  static constexpr bool kInvariant = kInvariant_;
  static constexpr bool kFp8 = sizeof(TKV) == 1;
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0 && kHeadDim <= 256 && kHeadDimV <= 256);

  static constexpr int kKChunks = kHeadDim * int(sizeof(TKV)) / 16;  // 16-byte chunks of a row of K
  static constexpr int kVChunks = kHeadDimV * int(sizeof(TKV)) / 16;
  static constexpr int kKBytes = tile_bytes(kKvTile, kKChunks * 16);
  static constexpr int kVBytes = tile_bytes(kKvTile, kVChunks * 16);
  static constexpr int kStageBytes = kKBytes + kVBytes;

  // Queries on the way in, results on the way out: one slice for each 16 rows.
  static constexpr int kSliceBytes = tile_bytes(16, max_of(kHeadDim, kHeadDimV) * 2);
  static constexpr int kQBytes = kMaxRows / 16 * kSliceBytes;
  // Two buffers of logits for the 16 or 32 rows whose keys are spread over warps.
  static constexpr int kLogitBytes = 32 * kLogitStride * 4;
  static constexpr int kControlBytes = 1024;
  static constexpr int kFixedBytes = kQBytes + 2 * kLogitBytes + kControlBytes;
  static constexpr int kStages = min_of(kMaxStages, (kMaxSharedBytes - kFixedBytes) / kStageBytes);
  static_assert(kStages >= 2, "head dimensions too large for two pipeline stages");
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
};

// How the eight consumer warps share a tile of kRows rows. Every warp holds 16 rows whatever the height, and
// in the same layout, so that a row's bits do not depend on the height.
template <class Traits, int kRows>
struct Split {
  static constexpr int kRowGroups = kRows / 16;
  static constexpr int kWarps =
      kConsumerWarps / kRowGroups;  // warps of a row group; they share the columns of O
  // Sixteen and 32 rows: each warp computes the logits of its share of the keys and they are exchanged. 64
  // rows: both warps compute all of them, which costs as much as the exchange and needs no barrier.
  static constexpr bool kExchange = kWarps > 2;
  static constexpr int kKeys = kExchange ? kKvTile / kWarps : kKvTile;
  // Fragments of the queries stay in registers where the output leaves room for them.
  static constexpr bool kQInRegisters = kExchange && Traits::kHeadDim <= 128;
  static constexpr int kBlocks = Traits::kHeadDimV / 16;  // 16-column blocks of O
  static constexpr int kWarpBlocks = ceil_div(kBlocks, kWarps);
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows.
__device__ __forceinline__ uint32_t swizzled(int rows, int row, int chunk) {
  return uint32_t((chunk >> 3) * rows * kRowBytes + row * kRowBytes + (((chunk & 7) ^ (row & 7)) << 4));
}

}  // namespace fi::sm80
