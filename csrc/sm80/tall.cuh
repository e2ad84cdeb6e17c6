// SPDX-License-Identifier: Apache-2.0
// The tallest tile, 256 rows: a warp holds 32 of them, so that a fragment of keys or values that it reads
// from shared memory serves twice as much arithmetic. Reading fragments is what bounds a prefill.
#pragma once
#include "consumer.cuh"

namespace fi::sm80 {

template <class Traits>
struct TallConsumer {
  using Half = Consumer<Traits, false>;
  using T = typename Traits::T;
  static constexpr int kKeys = 32,
                       kTiles = kKeys / 8;  // of one softmax update: more would not fit the registers
  static_assert(Traits::kColumnWarps == 1 && Traits::kKvTile % kKeys == 0);

  const AttentionParams& p;
  const Work& w;
  const int lane, group, members = 1;
  Half upper, lower;  // 16 rows each

  __device__ __forceinline__ TallConsumer(const AttentionParams& p_, const LaunchConstants& c, const Work& w_,
                                          int tid, char* shared)
      : p(p_),
        w(w_),
        lane(tid % 32),
        group(tid / 32 * 2),
        upper(p_, c, w_, tid, shared, tid / 32 * 2),
        lower(p_, c, w_, tid, shared, tid / 32 * 2 + 1) {}

  __device__ __forceinline__ void step(uint32_t stage, int key_begin, float scale) {
    const float softmax_scale = kTransform ? 1.f : scale * kLog2e;
#pragma unroll 1
    for (int first = 0; first < Traits::kKvTile; first += kKeys) {
      float s[2][kTiles][4];
      logits(stage, first, key_begin, s);
      upper.transform(key_begin + first, scale, s[0]);
      lower.transform(key_begin + first, scale, s[1]);
      if constexpr (Variant::kSoftmax) {
        upper.weigh(softmax_scale, s[0]);
        lower.weigh(softmax_scale, s[1]);
      }
      accumulate(stage + Traits::kKBytes + first * kRowBytes, s);
    }
  }

  __device__ __forceinline__ void logits(uint32_t k_tile, int first, int key_begin,
                                         float (&s)[2][kTiles][4]) {
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[f][t][e] = 0.f;
    constexpr int kStepsRead = Traits::kFp8 ? 2 : 1;
    const uint32_t q_base =
        ptx::shared_address(upper.slice) + (lane % 16) * kRowBytes + (((lane >> 4) ^ (lane & 7)) << 4);
    const int key = first + (lane & 7) + ((lane >> 4) << 3);
    const uint32_t base = k_tile + key * kRowBytes + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < ceil_div(Traits::kKChunks, 2); ++i) {
      uint32_t b[kTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kTiles / 2 && !Variant::kTransformsKey; ++n)
        ptx::ldmatrix_x4(b[n], chunk_pair(base, Traits::kKvTile, i) + n * 16 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kStepsRead; ++j) {
        const int step = i * kStepsRead + j;
        if (step >= Half::kQSteps) continue;
        uint32_t q[2][4];
#pragma unroll
        for (int f = 0; f < 2; ++f)
          ptx::ldmatrix_x4(q[f], chunk_pair(q_base, 16, step) + f * kConsumerWarps * Traits::kSliceBytes);
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n)
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            if constexpr (Variant::kTransformsKey) {
              upper.multiply_transformed(s[f][2 * n], q[f], k_tile, key_begin, first / 8 + 2 * n, step);
              upper.multiply_transformed(s[f][2 * n + 1], q[f], k_tile, key_begin, first / 8 + 2 * n + 1,
                                         step);
            } else if constexpr (Traits::kFp8) {
              Half::multiply8(s[f][2 * n], q[f], b[n][j]);
              Half::multiply8(s[f][2 * n + 1], q[f], b[n][2 + j]);
            } else {
              ptx::mma_m16n8k16<T>(s[f][2 * n], q[f], b[n][0], b[n][1]);
              ptx::mma_m16n8k16<T>(s[f][2 * n + 1], q[f], b[n][2], b[n][3]);
            }
          }
      }
    }
  }

  __device__ __forceinline__ void accumulate(uint32_t v_rows, const float (&s)[2][kTiles][4]) {
    constexpr int kSteps = Traits::kFp8 ? 2 : 1;  // of 16 keys, that one ldmatrix reads
#pragma unroll
    for (int t = 0; t < kKeys / 16; t += kSteps) {
      uint32_t a[2][kSteps][4];
#pragma unroll
      for (int f = 0; f < 2; ++f)
#pragma unroll
        for (int j = 0; j < kSteps; ++j) Half::weights_fragment(s[f], t + j, a[f][j]);
#pragma unroll
      for (int n = 0; n < Half::kBlocks; ++n) {
        uint32_t b[4];
        Half::read_values(b, v_rows + t * 16 * kRowBytes, n, lane);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          Half::multiply_values(upper.out[2 * n], upper.out[2 * n + 1], a[0][j], b, j);
          Half::multiply_values(lower.out[2 * n], lower.out[2 * n + 1], a[1][j], b, j);
        }
      }
    }
  }
};

}  // namespace fi::sm80
