// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements that a variant transforms where they lie in shared memory, before they are
// multiplied: each element once, by loops that stay in the instruction caches. In fragments a transform stood
// at hundreds of places, or was a call for every pair of elements.
#pragma once
#include "../core/functions.h"
#include "ptx/ldmatrix.cuh"
#include "transformed_tiles.cuh"

namespace fi::sm80 {

template <class Traits>
inline constexpr bool kTransformsInPlace = kTransformsTiles && !Traits::kFp8;
template <class Traits>
inline constexpr bool kMayTurn = kTransformsInPlace<Traits> && Variant::kTurnsKeys;
// Whether keys only turn. They stay as they are otherwise: products with queries are multiplied by what the
// cache's elements are.
template <class Traits>
__device__ __forceinline__ bool turns_in_place(const AttentionParams& p) {
  if constexpr (kMayTurn<Traits>) return Variant::turns_keys(p);
  return false;
}

constexpr int lanes_for(int chunks) { return chunks <= 4 ? 4 : chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32; }

// Rows [begin, end) of a tile, the keys of which are counted from `key_begin`; by one warp.
struct TileRows {
  char* tile;  // K or V, in shared memory
  int key_begin, begin, end;
  int request, kv_head;

  __device__ __forceinline__ KeyIndexOf<int> index(int row) const {
    return {request, key_begin + row, kv_head};
  }
};

// A lane has eight pairs of every few rows, so that what a functor reads for a pair is read once: no other
// lane is asked for anything in between.
template <class Traits, class Variant>
__device__ __forceinline__ void turn_rows(const AttentionParams& p, const TileRows& rows) {
  using T = typename Traits::T;
  constexpr int kChunks = Traits::kHeadDim / 16, kLanes = lanes_for(kChunks), kPairs = 8;
  const int lane = threadIdx.x % 32, chunk = lane % kLanes;
  if (chunk >= kChunks) return;
  const uint32_t tile = ptx::shared_address(rows.tile);
#pragma unroll 1
  for (int row = rows.begin + lane / kLanes; row < rows.end; row += 32 / kLanes) {
    const uint32_t low = tile + swizzled(Traits::kKvTile, row, chunk);
    const uint32_t high = tile + swizzled(Traits::kKvTile, row, chunk + kChunks);
    uint4 a4 = ptx::load_shared_16(low), b4 = ptx::load_shared_16(high);
    auto& a = reinterpret_cast<uint32_t (&)[kPairs / 2]>(a4);
    auto& b = reinterpret_cast<uint32_t (&)[kPairs / 2]>(b4);
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      float x[2], y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float turns =
            Variant::template key_turns<float>(p, chunk * kPairs + 2 * i + e, rows.index(row));
        const float sine = functions::sin_turns(turns), cosine = functions::cos_turns(turns);
        const float first = float(reinterpret_cast<const T*>(&a[i])[e]);
        const float second = float(reinterpret_cast<const T*>(&b[i])[e]);
        x[e] = first * cosine - second * sine;
        y[e] = second * cosine + first * sine;
      }
      a[i] = ptx::pack2<T>(x[0], x[1]);
      b[i] = ptx::pack2<T>(y[0], y[1]);
    }
    ptx::store_shared_16(low, a4);
    ptx::store_shared_16(high, b4);
  }
}

// One copy for all heights of tiles: the assembler may round differently in two.
template <class Traits, class Variant>
__device__ __noinline__ void turn_rows_in_one_copy(const AttentionParams& p, const TileRows& rows) {
  turn_rows<Traits, Variant>(p, rows);
}

// By any functor: element d of the row at `row` is transform(load, d, index, whole), where `whole` is what
// whole_row(load, index) made of it, worked out by one lane. Rows outside of [begin, end) stay as they are.
template <class Traits, int kHeadDim, class WholeRow, class Transform>
__device__ __forceinline__ void transform_rows(const TileRows& rows, float scale, WholeRow whole_row,
                                               Transform transform) {
  using T = typename Traits::T;
  constexpr int kChunks = kHeadDim / 8, kLanes = lanes_for(kChunks), kAtOnce = 32 / kLanes, kElements = 8;
  static_assert(kChunks <= 32 && kElements == 8);
  const int lane = threadIdx.x % 32, chunk = lane % kLanes;
  const uint32_t tile = ptx::shared_address(rows.tile);
#pragma unroll 1
  for (int first = rows.begin; first < rows.end; first += 32) {
    const int own = min(first + lane, rows.end - 1);
    const float own_whole = whole_row(element_loader<Traits>(tile, own, scale), rows.index(own));
#pragma unroll 1
    for (int at = 0; at < min(32, rows.end - first); at += kAtOnce) {
      const int row = min(first + at + lane / kLanes, rows.end - 1);
      const float whole = __shfl_sync(~0u, own_whole, row - first);
      const bool mine = first + at + lane / kLanes < rows.end && chunk < kChunks;
      const auto load = element_loader<Traits>(tile, row, scale);
      uint32_t made[kElements / 2];
#pragma unroll
      for (int i = 0; i < kElements / 2; ++i) {
        const int d = min(chunk, kChunks - 1) * kElements + 2 * i;
        made[i] = ptx::pack2<T>(transform(load, d, rows.index(row), whole),
                                transform(load, d + 1, rows.index(row), whole));
      }
      __syncwarp();  // all lanes have read the row
      if (mine)
        *reinterpret_cast<uint4*>(rows.tile + swizzled(Traits::kKvTile, row, chunk)) =
            make_uint4(made[0], made[1], made[2], made[3]);
    }
  }
}

// One copy in a module: the code of a functor may be long.
template <class Traits>
__device__ __noinline__ void transform_key_rows(const AttentionParams& p, const TileRows& rows) {
  transform_rows<Traits, Traits::kHeadDim>(
      rows, p.k_scale[rows.kv_head * p.k_scale_stride],
      [&](const auto& load, const auto& i) { return Variant::template key_row<float>(p, load, i); },
      [&](const auto& load, int d, const auto& i, float whole) {
        return Variant::template key_transform<float>(p, load, d, i, whole);
      });
}

template <class Traits>
__device__ __noinline__ void transform_value_rows(const AttentionParams& p, const TileRows& rows) {
  transform_rows<Traits, Traits::kHeadDimV>(
      rows, p.v_scale[rows.kv_head * p.v_scale_stride], [](const auto&, const auto&) { return 0.f; },
      [&](const auto& load, int d, const auto& i, float) {
        return Variant::template value_transform<float>(p, load, d, i);
      });
}

// Part `part` of `parts` of the rows of a tile of the ring, whose first key is `key_begin`. Values that do
// not exist stay zeros: their weight is 0, which infinity in their place would turn into NaN.
template <class Traits>
__device__ __forceinline__ void transform_in_place(const AttentionParams& p, const Work& w, int kv_head,
                                                   uint32_t stage, int key_begin, int part, int parts) {
  auto* const tile = static_cast<char*>(__cvta_shared_to_generic(stage));
  const int count = Traits::kKvTile / parts, begin = part * count;
  TileRows rows{tile, key_begin, begin, begin + count, w.request, kv_head};
  if constexpr (Variant::kTransformsKey) {
    if (!turns_in_place<Traits>(p))
      transform_key_rows<Traits>(p, rows);
    else if constexpr (kMayTurn<Traits> && Traits::kInvariant)
      turn_rows_in_one_copy<Traits, Variant>(p, rows);
    else if constexpr (kMayTurn<Traits>)
      turn_rows<Traits, Variant>(p, rows);
  }
  if constexpr (Variant::kTransformsValue) {
    rows.tile = tile + Traits::kKBytes;
    rows.begin = max(rows.begin, max(w.lo, w.kv_begin) - key_begin);
    rows.end = min(rows.end, w.kv_end - key_begin);
    if (rows.begin < rows.end) transform_value_rows<Traits>(p, rows);
  }
}

}  // namespace fi::sm80
