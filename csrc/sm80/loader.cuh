// SPDX-License-Identifier: Apache-2.0
// Brings scattered pages into contiguous, swizzled tiles: the only code that knows the KV layout.
#pragma once
#include "../core/params.h"
#include "../ptx/cp_async.cuh"
#include "launch.h"
#include "traits.cuh"

namespace fi::sm80 {

// A warp brings 16 rows (keys) of a tile, eight lanes a row, four rows at a time. Lane i < 16 knows where row
// i lies and tells the lanes that copy it. Indices are read one tile ahead and used as late as possible: the
// latency of the dependent load hides behind the tile that is being computed.
template <class Traits, bool kIndexed>
struct KvLoader {
  using T = typename Traits::T;
  static constexpr int kRowsPerWarp = kKvTile / kWarps;

  const AttentionParams& p;  // constant bank: strides and divisors cost no registers
  const LaunchConstants& c;
  int tid;
  int request, kv_head;
  int lo, hi;      // keys [lo, hi) may be read
  int32_t index;   // of this lane's row
  int32_t offset;  // token within the page, -1: no such key

  __device__ __forceinline__ int chunk() const { return tid % 8; }
  __device__ __forceinline__ int warp_row() const { return (tid / 32) * kRowsPerWarp; }

  __device__ __forceinline__ KvLoader(const AttentionParams& p_, const LaunchConstants& c_, int tid_,
                                      int request_, int kv_head_, int lo_, int hi_)
      : p(p_), c(c_), tid(tid_), request(request_), kv_head(kv_head_), lo(lo_), hi(hi_) {}

  // Reads the index of this lane's row in the tile that starts at key `begin`.
  __device__ __forceinline__ void look_up(int begin) {
    const int key = begin + warp_row() + tid % kRowsPerWarp;
    const bool valid = key >= lo && key < hi;
    const int page = c.page_size.divide(valid ? key : lo);
    offset = valid ? key - page * c.page_size.divisor : -1;
    index = page;
    if (kIndexed && valid)
      index = __ldg(p.level.indices + p.level.row_begin[request] + int64_t(page) * p.level.index_step);
  }

  // Starts the copies of the tile that was looked up last; rows outside [lo, hi) become zeros, since
  // 0 * NaN would be NaN in the product with V.
  __device__ __forceinline__ void copy(uint32_t k_tile, uint32_t v_tile) {
    const char* k = static_cast<const char*>(p.k) + int64_t(kv_head) * c.k_head_bytes + chunk() * kChunkBytes;
    const char* v = static_cast<const char*>(p.v) + int64_t(kv_head) * c.v_head_bytes + chunk() * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp / 4; ++i) {
      const int row = i * 4 + (tid % 32) / 8;
      const int32_t found = __shfl_sync(~0u, index, row), token = __shfl_sync(~0u, offset, row);
      int64_t page = c.index_divisor.divisor == 1 ? found : c.index_divisor.divide(found);
      if constexpr (!kIndexed) page = p.level.row_begin[request] + found;
      const bool valid = token >= 0;
      const uint32_t bytes = valid ? kChunkBytes : 0;
      const uint32_t to = (warp_row() + row) * 128 + ((chunk() ^ (row & 7)) << 4);
      copy_row<Traits::kHeadDim>(
          k_tile + to, k + (valid ? page * c.k_page_bytes + int64_t(token) * c.k_token_bytes : 0), bytes);
      copy_row<Traits::kHeadDimV>(
          v_tile + to, v + (valid ? page * c.v_page_bytes + int64_t(token) * c.v_token_bytes : 0), bytes);
    }
  }

  template <int kDim>
  __device__ __forceinline__ void copy_row(uint32_t destination, const char* source, uint32_t bytes) const {
#pragma unroll
    for (int s = 0; s < subtiles(kDim); ++s)
      if ((s + 1) * kSubtileCols <= kDim || s * 8 + chunk() < kDim / 8)
        ptx::cp_async_16(destination + s * kKvTile * 128, source + s * 128, bytes);
  }
};

}  // namespace fi::sm80
