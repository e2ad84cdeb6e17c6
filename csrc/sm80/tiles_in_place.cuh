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
// Whether warps may part the keys of a tile: those of one row group that have all columns of their rows. Bits
// would depend on the height of tiles.
template <class Traits>
inline constexpr bool kTransformsAlone =
    kTransformsInPlace<Traits> && Traits::kColumnWarps == 1 && !Traits::kInvariant;
inline constexpr int kKeysAlone = 16;
template <class Traits>
inline constexpr bool kMayTurn = kTransformsInPlace<Traits> && Variant::kTurnsKeys;
// Whether they turn by the same from each key to the next, so that few of the turns are worked out. Bits
// would depend on where an item begins.
template <class Traits>
inline constexpr bool kTurnsEvenly = kMayTurn<Traits> && Variant::kTurnsEvenly && !Traits::kInvariant;
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

// A lane turns eight pairs of a row: those of the 16 bytes at chunk `chunk` and of as many half a row
// further, which are their second elements or, where neighbours turn together, pairs of their own.
template <class Traits>
struct TurningLanes {
  static constexpr int kChunks = Traits::kHeadDim / 16, kLanes = lanes_for(kChunks), kPairs = 8;
  static constexpr int kRows = 32 / kLanes;  // at once

  __device__ __forceinline__ static int pair(int chunk, int i) {
    if constexpr (Variant::kTurnsNeighbours) return (chunk + i / 4 * kChunks) * 4 + i % 4;
    return chunk * kPairs + i;
  }
};

// How far the pairs of a lane turn.
struct Phases {
  float cosine[8], sine[8];

  // By another turn.
  __device__ __forceinline__ void advance(const Phases& by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float c = cosine[i] * by.cosine[i] - sine[i] * by.sine[i];
      sine[i] = sine[i] * by.cosine[i] + cosine[i] * by.sine[i];
      cosine[i] = c;
    }
  }
};

// Of a key, or what lies between it and the key `step` further on.
template <class Traits, class Variant>
__device__ __forceinline__ void set_phases(Phases& phases, const AttentionParams& p, int chunk,
                                           KeyIndexOf<int> key, int step) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int pair = TurningLanes<Traits>::pair(chunk, i);
    float turns = Variant::template key_turns<float>(p, pair, key);
    if (step > 0) {
      KeyIndexOf<int> further = key;
      further.kv_pos += step;
      turns = Variant::template key_turns<float>(p, pair, further) - turns;
    }
    phases.cosine[i] = functions::cos_turns(turns);
    phases.sine[i] = functions::sin_turns(turns);
  }
}
// In one copy: it is called now and then, from several places.
template <class Traits, class Variant>
__device__ __noinline__ void set_phases_in_one_copy(Phases& phases, const AttentionParams& p, int chunk,
                                                    const KeyIndexOf<int>& key, int step) {
  set_phases<Traits, Variant>(phases, p, chunk, key, step);
}
// A copy of what was set, since a variable whose address was passed on would stay in memory.
template <class Traits, class Variant>
__device__ __forceinline__ Phases phases_of(const AttentionParams& p, int chunk, const KeyIndexOf<int>& key,
                                            int step) {
  Phases found;
  set_phases_in_one_copy<Traits, Variant>(found, p, chunk, key, step);
  return found;
}

// Eight pairs of a row that a lane turns; low, high: where they are.
template <class Traits>
struct TurningPairs {
  using T = typename Traits::T;
  uint32_t low, high;
  uint4 first, second;

  __device__ __forceinline__ void load() {
    first = ptx::load_shared_16(low);
    second = ptx::load_shared_16(high);
  }
  __device__ __forceinline__ void store() const {
    ptx::store_shared_16(low, first);
    ptx::store_shared_16(high, second);
  }
  __device__ __forceinline__ void turn(const Phases& phases) {
    uint32_t x[4] = {first.x, first.y, first.z, first.w}, y[4] = {second.x, second.y, second.z, second.w};
    const auto turn_pair = [&](int i, float& a, float& b) {
      const float before = a;
      a = before * phases.cosine[i] - b * phases.sine[i];
      b = b * phases.cosine[i] + before * phases.sine[i];
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 u = ptx::unpack2<T>(x[i]), v = ptx::unpack2<T>(y[i]);
      if constexpr (Variant::kTurnsNeighbours) {
        turn_pair(i, u.x, u.y);
        turn_pair(4 + i, v.x, v.y);
      } else {
        turn_pair(2 * i, u.x, v.x);
        turn_pair(2 * i + 1, u.y, v.y);
      }
      x[i] = ptx::pack2<T>(u.x, u.y);
      y[i] = ptx::pack2<T>(v.x, v.y);
    }
    first = make_uint4(x[0], x[1], x[2], x[3]);
    second = make_uint4(y[0], y[1], y[2], y[3]);
  }
};

// Turns of keys that follow from nothing but the functor, key by key.
template <class Traits, class Variant>
__device__ __forceinline__ void turn_rows(const AttentionParams& p, const TileRows& rows) {
  using Lanes = TurningLanes<Traits>;
  const int lane = threadIdx.x % 32, chunk = lane % Lanes::kLanes;
  if (chunk >= Lanes::kChunks) return;
  const uint32_t tile = ptx::shared_address(rows.tile);
#pragma unroll 1
  for (int row = rows.begin + lane / Lanes::kLanes; row < rows.end; row += Lanes::kRows) {
    Phases phases;
    set_phases<Traits, Variant>(phases, p, chunk, rows.index(row), 0);
    TurningPairs<Traits> pairs{tile + swizzled(Traits::kKvTile, row, chunk),
                               tile + swizzled(Traits::kKvTile, row, chunk + Lanes::kChunks)};
    pairs.load();
    pairs.turn(phases);
    pairs.store();
  }
}

// One copy for all heights of tiles: the assembler may round differently in two. Also for what rarely runs.
template <class Traits, class Variant>
__device__ __noinline__ void turn_rows_in_one_copy(const AttentionParams& p, const TileRows& rows) {
  turn_rows<Traits, Variant>(p, rows);
}

// Element `i` of 16 bytes. Words are chosen, not indexed: an index that is not known would put them in
// memory.
template <typename T>
__device__ __forceinline__ float element_of(const uint4& chunk, int i) {
  const uint32_t word = i & 4 ? (i & 2 ? chunk.w : chunk.z) : (i & 2 ? chunk.y : chunk.x);
  const float2 both = ptx::unpack2<T>(word);
  return i & 1 ? both.y : both.x;
}

// Gives element d of a row for which a lane has the 16 bytes at chunk `own`, where functors mostly look.
template <class Traits, int kDim>
struct RowInTile {
  using T = typename Traits::T;
  static constexpr int kSize = kDim;
  uint32_t tile;
  int row, own;  // its first element there
  float scale;
  uint4 chunk;

  __device__ __forceinline__ float operator()(int d) const {
    if (uint32_t(d - own) < 8) return scale * element_of<T>(chunk, d - own);
    const uint16_t bits = ptx::load_shared_2(tile + swizzled(Traits::kKvTile, row, d >> 3) + (d & 7) * 2);
    return scale * ptx::unpack2<T>(bits).x;
  }
};
// Gives element d of a row of which one lane reads all.
template <class Traits, int kDim>
struct WholeRow {
  static constexpr int kSize = kDim;
  uint32_t tile;
  int row;
  float scale;

  __device__ __forceinline__ float operator()(int d) const {
    const auto* const at =
        static_cast<const char*>(__cvta_shared_to_generic(tile)) + swizzled(Traits::kKvTile, row, d >> 3);
    return scale * element_of<typename Traits::T>(*reinterpret_cast<const uint4*>(at), d & 7);
  }
};

// By any functor: element d of a row is transform(load, d, index, whole), where `whole` is what
// whole_row(load, index) made of it, worked out by one lane. Rows outside of [begin, end) stay as they are.
template <class Traits, int kDim, class GetWhole, class Transform>
__device__ __forceinline__ void transform_rows(const TileRows& rows, float scale, GetWhole whole_row,
                                               Transform transform) {
  using T = typename Traits::T;
  constexpr int kChunks = kDim / 8, kLanes = lanes_for(kChunks), kAtOnce = 32 / kLanes;
  // Rows whose elements are made beside each other, from parameters that are read once. Functors of keys that
  // turn are long and rarely run.
  constexpr int kTogether = Variant::kTurnsKeys ? 1 : 4;
  static_assert(kChunks <= 32);
  const int lane = threadIdx.x % 32, chunk = lane % kLanes;
  const int own_chunk = min(chunk, kChunks - 1), begin = own_chunk * 8;
  const uint32_t tile = ptx::shared_address(rows.tile);
#pragma unroll 1
  for (int first = rows.begin; first < rows.end; first += 32) {
    const int own = min(first + lane, rows.end - 1);
    const float own_whole = whole_row(WholeRow<Traits, kDim>{tile, own, scale}, rows.index(own));
    ptx::sync_warp();
#pragma unroll 1
    for (int at = 0; at < min(32, rows.end - first); at += kTogether * kAtOnce) {
      RowInTile<Traits, kDim> load[kTogether];
      float whole[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int row = min(first + at + j * kAtOnce + lane / kLanes, rows.end - 1);
        whole[j] = __shfl_sync(~0u, own_whole, row - first);
        const uint32_t address = tile + swizzled(Traits::kKvTile, row, own_chunk);
        load[j] = {tile, row, begin, scale, ptx::load_shared_16(address)};
      }
      uint32_t made[kTogether][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const int d = begin + 2 * i;
          const auto index = rows.index(load[j].row);
          made[j][i] = ptx::pack2<T>(transform(load[j], d, index, whole[j]),
                                     transform(load[j], d + 1, index, whole[j]));
        }
      ptx::sync_warp();  // all lanes have read the rows
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (first + at + j * kAtOnce + lane / kLanes < rows.end && chunk < kChunks)
          ptx::store_shared_16(tile + swizzled(Traits::kKvTile, load[j].row, own_chunk),
                               make_uint4(made[j][0], made[j][1], made[j][2], made[j][3]));
    }
  }
  __syncwarp();
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
    else if constexpr (kMayTurn<Traits> && (Traits::kInvariant || kTurnsEvenly<Traits>))
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
