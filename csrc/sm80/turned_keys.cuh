// SPDX-License-Identifier: Apache-2.0
// Keys that a variant turns, element d together with element d + head_dim / 2: both halves of a pair lie at
// the same place of two fragments, so that a lane turns them in its registers, with one sine and one cosine.
#pragma once
#include "../core/functions.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "traits.cuh"

namespace fi::sm80 {

__device__ __forceinline__ uint32_t chunk_pair(uint32_t base, int rows, int pair);  // of consumer.cuh

// Whether the keys of a module can be turned that way: fragments of fp8 keys are permuted, and both halves
// have to be whole ksteps.
template <class Traits, class Variant>
inline constexpr bool kTurnsFragments = Variant::kTurnsKeys && !Traits::kFp8 && Traits::kHeadDim % 32 == 0;

// Two neighbouring pairs: `low` and `high` hold the elements of their first and second halves.
template <class T>
__device__ __forceinline__ void turn_pairs(const float (&sine)[2], const float (&cosine)[2], uint32_t& low,
                                           uint32_t& high) {
  float x[2], y[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float a = float(reinterpret_cast<const T*>(&low)[e]);
    const float b = float(reinterpret_cast<const T*>(&high)[e]);
    x[e] = a * cosine[e] - b * sine[e];
    y[e] = b * cosine[e] + a * sine[e];
  }
  low = ptx::pack2<T>(x[0], x[1]);
  high = ptx::pack2<T>(y[0], y[1]);
}

template <class Traits, class Consumer>
__device__ __forceinline__ void query_fragment(const Consumer& x, int step, uint32_t (&a)[4]) {
  if constexpr (Traits::kQInRegisters) {
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = x.q[step][e];
  } else {
    x.read_q(step, a);
  }
}

// Logits of a tile's keys for the rows of the consumer `x`.
template <class Traits, class Variant, class Consumer, int kTiles>
__device__ __forceinline__ void turned_logits(const Consumer& x, uint32_t k_tile, int key_begin,
                                              float (&s)[kTiles][4]) {
  using T = typename Traits::T;
  constexpr int kHalf = Traits::kHeadDim / 32, kKvTile = Traits::kKvTile;
  const float k_scale = x.p.k_scale[x.kv_head() * x.p.k_scale_stride];
  const int key = (x.lane & 7) + ((x.lane >> 4) << 3);
  const uint32_t base = k_tile + key * kRowBytes + ((((x.lane >> 3) & 1) ^ (x.lane & 7)) << 4);
#pragma unroll
  for (int step = 0; step < kHalf; ++step) {
    uint32_t q_low[4], q_high[4];
    query_fragment<Traits>(x, step, q_low);
    query_fragment<Traits>(x, step + kHalf, q_high);
    uint32_t low[kTiles / 2][4], high[kTiles / 2][4];
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      ptx::ldmatrix_x4(low[n], chunk_pair(base, kKvTile, step) + n * 16 * kRowBytes);
      ptx::ldmatrix_x4(high[n], chunk_pair(base, kKvTile, step + kHalf) + n * 16 * kRowBytes);
    }
    // No instruction that might write memory stands between these, so that what a functor reads for a pair is
    // read once for all keys.
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int position = key_begin + t * 8 + x.lane / 4, pair = step * 16 + r * 8 + x.lane % 4 * 2;
        float sine[2], cosine[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const KeyIndexOf<int> index{x.w.request, position, x.kv_head()};
          const float turns = Variant::template key_turns<float>(x.p, pair + e, index);
          sine[e] = k_scale * functions::sin_turns(turns);
          cosine[e] = k_scale * functions::cos_turns(turns);
        }
        turn_pairs<T>(sine, cosine, low[t / 2][t % 2 * 2 + r], high[t / 2][t % 2 * 2 + r]);
      }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      ptx::mma_m16n8k16<T>(s[t], q_low, low[t / 2][t % 2 * 2], low[t / 2][t % 2 * 2 + 1]);
      ptx::mma_m16n8k16<T>(s[t], q_high, high[t / 2][t % 2 * 2], high[t / 2][t % 2 * 2 + 1]);
    }
  }
}

}  // namespace fi::sm80
