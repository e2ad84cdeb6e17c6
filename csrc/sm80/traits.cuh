// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the mma.sync template and the shared memory that follows from them.
#pragma once
#include <cstdint>

namespace fi::sm80 {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kKvTile = 64;       // keys of one pipeline stage
inline constexpr int kChunkBytes = 16;   // one cp.async
inline constexpr int kSubtileCols = 64;  // 16-bit columns of a 128-byte swizzled row

// A tile of `rows` x `cols` 16-bit elements is stored as ceil(cols / 64) subtiles of 128-byte rows whose
// 16-byte chunks are XORed with the row number, so that ldmatrix and cp.async are free of bank conflicts.
constexpr int subtiles(int cols) { return (cols + kSubtileCols - 1) / kSubtileCols; }
constexpr int tile_bytes(int rows, int cols) { return rows * subtiles(cols) * 128; }

template <typename T_, int kHeadDim_, int kHeadDimV_>
struct Traits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);

  static constexpr int kKBytes = tile_bytes(kKvTile, kHeadDim);
  static constexpr int kVBytes = tile_bytes(kKvTile, kHeadDimV);
  static constexpr int kStageBytes = kKBytes + kVBytes;
  static constexpr int kMailboxBytes = 128;
  static constexpr int kMaxSharedBytes =
      228 * 1024 / 2 - 1024 - kMailboxBytes;  // two CTAs an SM, 1 KiB each is the system's

  template <int kRows>
  struct Tile {
    static constexpr int kWarpsQ = kRows >= 64 ? 4 : kRows / 16;
    static constexpr int kWarpsKv = kWarps / kWarpsQ;
    static constexpr int kFragments = kRows / (16 * kWarpsQ);  // 16-row fragments of a warp
    // Keys of one softmax update: two fragments a warp leave registers for half a tile (docs/design/sm80.md).
    static constexpr int kStep = kFragments == 2 ? kKvTile / 2 : kKvTile;
    static constexpr int kKeys = kStep / kWarpsKv;   // keys whose logits a warp computes
    static constexpr int kBlocksV = kHeadDimV / 16;  // 16-column blocks of the output
    static constexpr int kWarpBlocksV = (kBlocksV + kWarpsKv - 1) / kWarpsKv;
    // Queries on the way in, results on the way out.
    static constexpr int kQBytes = tile_bytes(kRows, kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV);
    static constexpr int kLogitStride = kKvTile + 8;  // floats; keeps the exchange free of bank conflicts
    static constexpr int kLogitBytes = kWarpsKv > 1 ? kRows * kLogitStride * 4 : 0;
    static constexpr int kFixedBytes = kQBytes + kLogitBytes;
    static constexpr int kStages = (kMaxSharedBytes - kFixedBytes) / kStageBytes >= 3 ? 3 : 2;
    static constexpr int kBytes = kFixedBytes + kStages * kStageBytes;
  };
  static constexpr int max2(int a, int b) { return a > b ? a : b; }
  static constexpr int kSharedBytes =
      max2(max2(Tile<16>::kBytes, Tile<32>::kBytes), max2(Tile<64>::kBytes, Tile<128>::kBytes)) +
      kMailboxBytes;
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows.
__device__ __forceinline__ uint32_t swizzled(int rows, int row, int chunk) {
  return uint32_t((chunk >> 3) * rows * 128 + row * 128 + (((chunk & 7) ^ (row & 7)) << 4));
}

}  // namespace fi::sm80
