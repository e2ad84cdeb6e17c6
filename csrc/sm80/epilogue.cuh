// SPDX-License-Identifier: Apache-2.0
// What becomes of an item: final rows, or partial states that the last item of a merge unit folds.
#pragma once
#include "consumer.cuh"

namespace fi::sm80 {

__device__ __forceinline__ int64_t row_offset(const AttentionParams& p, const LaunchConstants& c,
                                              int token_begin, int packed, int kv_head, int64_t stride_token,
                                              int64_t stride_head) {
  const int token = c.group.divide(packed);
  return int64_t(token_begin + token) * stride_token +
         int64_t(kv_head * p.group + packed - token * p.group) * stride_head;
}

__device__ __forceinline__ int qo_head(const AttentionParams& p, const LaunchConstants& c, int packed,
                                       int kv_head) {
  return kv_head * p.group + packed - c.group.divide(packed) * p.group;
}

// The state (o, lse) of the keys so far, as floats, to row `first_row` + row of the partial states.
template <class Traits, int kRows>
__device__ __forceinline__ void store_partial(Consumer<Traits, kRows>& x, int first_row, bool normalised,
                                              const float (&lse)[2], const float (&inverse)[2]) {
  using S = Split<Traits, kRows>;
  const AttentionParams& p = x.p;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = x.row_of(r);
    if (row >= x.w.q_rows) continue;
    const int64_t state = int64_t(first_row + row) * p.num_kv_heads + x.w.kv_head;
    if (x.lane % 4 == 0 && x.member() == 0) __stcg(p.partial_lse + state, lse[r]);
    const float factor = normalised ? 1.f : inverse[r];
    float* to = p.partial_out + state * Traits::kHeadDimV;
#pragma unroll
    for (int n = 0; n < S::kWarpBlocks; ++n) {
      const int block = x.block_of(n);
      if (block >= S::kBlocks) break;
      if constexpr (Traits::kFp8) {
        __stcg(reinterpret_cast<float4*>(to + block * 16 + (x.lane % 4) * 4),
               make_float4(x.out[2 * n][2 * r] * factor, x.out[2 * n + 1][2 * r] * factor,
                           x.out[2 * n][2 * r + 1] * factor, x.out[2 * n + 1][2 * r + 1] * factor));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          __stcg(reinterpret_cast<float2*>(to + block * 16 + h * 8 + (x.lane % 4) * 2),
                 make_float2(x.out[2 * n + h][2 * r] * factor, x.out[2 * n + h][2 * r + 1] * factor));
      }
    }
  }
}

// Final rows go through shared memory (the slice of the queries, free by now) to leave as whole 16-byte
// chunks.
template <class Traits, int kRows>
__device__ __forceinline__ void store_final(Consumer<Traits, kRows>& x, bool normalised, float (&lse)[2],
                                            const float (&inverse)[2]) {
  using T = typename Traits::T;
  using S = Split<Traits, kRows>;
  const AttentionParams& p = x.p;
  const Work& w = x.w;
  x.sync_group();  // the queries have been read
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = x.row_of(r);
    float factor = normalised ? 1.f : inverse[r];
    if (row < w.q_rows) {
      const int packed = w.q_begin + row;
      if (lse[r] != -INFINITY)
        factor *= Variant::finish(p, qo_head(p, x.c, packed, w.kv_head), w.kv_head, lse[r]);
      if (w.faults) factor = lse[r] = __int_as_float(0x7FC00000);
      if (p.lse && x.lane % 4 == 0 && x.member() == 0)
        p.lse[row_offset(p, x.c, w.token_begin, packed, w.kv_head, p.lse_stride_token, p.lse_stride_head)] =
            lse[r];
    }
    const int slice_row = x.lane / 4 + r * 8;
#pragma unroll
    for (int n = 0; n < S::kWarpBlocks; ++n) {
      const int block = x.block_of(n);
      if (block >= S::kBlocks) break;
      if constexpr (Traits::kFp8) {
        const int at = (x.lane % 4) * 4;  // four neighbouring columns
        *reinterpret_cast<uint2*>(x.slice + swizzled(16, slice_row, block * 2 + at / 8) + at % 8 * 2) =
            make_uint2(ptx::pack2<T>(x.out[2 * n][2 * r] * factor, x.out[2 * n + 1][2 * r] * factor),
                       ptx::pack2<T>(x.out[2 * n][2 * r + 1] * factor, x.out[2 * n + 1][2 * r + 1] * factor));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<uint32_t*>(x.slice + swizzled(16, slice_row, block * 2 + h) + (x.lane % 4) * 4) =
              ptx::pack2<T>(x.out[2 * n + h][2 * r] * factor, x.out[2 * n + h][2 * r + 1] * factor);
      }
    }
  }
  __syncwarp();
  // A warp sends the columns that it wrote.
  const int blocks = min(S::kWarpBlocks, S::kBlocks - x.block_of(0));
  for (int i = x.lane; i < 16 * blocks * 2; i += 32) {
    const int row = i / (blocks * 2), chunk = x.block_of(0) * 2 + i % (blocks * 2);
    const int tile_row = x.group() * 16 + row;
    if (tile_row >= w.q_rows) continue;
    T* to = static_cast<T*>(p.out) + row_offset(p, x.c, w.token_begin, w.q_begin + tile_row, w.kv_head,
                                                p.out_stride_token, p.out_stride_head);
    *reinterpret_cast<uint4*>(to + chunk * 8) =
        *reinterpret_cast<const uint4*>(x.slice + swizzled(16, row, chunk));
  }
}

inline constexpr int kMergeBatch = 8;

// Ordered left fold of the parts of a unit by all consumers: 16 or 32 lanes a row, four columns a lane.
template <class Traits>
__device__ __forceinline__ void merge(const AttentionParams& p, const LaunchConstants& c,
                                      const MergeUnit& unit, int kv_head, int tid) {
  using T = typename Traits::T;
  const int32_t* parts = reinterpret_cast<const int32_t*>(p.plan + p.layout.parts);
  const int token_begin = p.qo_indptr[unit.request];
  const int tokens = min(p.qo_indptr[unit.request + 1], p.num_tokens) - token_begin;
  const int rows = token_begin < 0 ? 0 : min(unit.q_rows, tokens * p.group - unit.q_begin);
  constexpr int kVectors = Traits::kHeadDimV / 4;
  constexpr int kLanes = kVectors <= 16 ? 16 : 32;
  const int lane = tid % kLanes;
  for (int row = tid / kLanes; row < rows; row += kConsumers / kLanes) {
    for (int vector = lane; vector < kVectors; vector += kLanes) {
      float lse = -INFINITY, sum = 0.f;
      float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int begin = unit.parts_begin; begin < unit.parts_end; begin += kMergeBatch) {
        // All loads of a batch are in flight together: one after another they would cost 0.3 us a part.
        float part_lse[kMergeBatch];
        float4 o[kMergeBatch];
#pragma unroll
        for (int i = 0; i < kMergeBatch; ++i) {
          part_lse[i] = -INFINITY;
          if (begin + i >= unit.parts_end) continue;
          const int64_t state = int64_t(parts[begin + i] + row) * p.num_kv_heads + kv_head;
          part_lse[i] = __ldcg(p.partial_lse + state);
          o[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + state * Traits::kHeadDimV) + vector);
        }
#pragma unroll
        for (int i = 0; i < kMergeBatch; ++i) {
          if (part_lse[i] == -INFINITY) continue;
          float a, b, next;
          if constexpr (Traits::kInvariant) {
            join(lse, part_lse[i], a, b, next);
          } else {
            // Normalised once at the end: `lse` is the largest so far.
            next = fmaxf(lse, part_lse[i]);
            a = ptx::exp2_approx((lse - next) * kLog2e);
            b = ptx::exp2_approx((part_lse[i] - next) * kLog2e);
            if (part_lse[i] != part_lse[i]) b = part_lse[i];
            sum = fmaf(sum, a, b);
          }
          acc = make_float4(joined(acc.x, a, o[i].x, b), joined(acc.y, a, o[i].y, b),
                            joined(acc.z, a, o[i].z, b), joined(acc.w, a, o[i].w, b));
          lse = next;
        }
      }
      float factor = 1.f;
      if constexpr (!Traits::kInvariant) {
        factor = sum > 0.f ? 1.f / sum : sum;
        lse = sum > 0.f ? lse + logf(sum) : sum == 0.f ? -INFINITY : sum;
      }
      const int packed = unit.q_begin + row;
      if (lse != -INFINITY) factor *= Variant::finish(p, qo_head(p, c, packed, kv_head), kv_head, lse);
      T* to = static_cast<T*>(p.out) +
              row_offset(p, c, token_begin, packed, kv_head, p.out_stride_token, p.out_stride_head) +
              vector * 4;
      *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack2<T>(acc.x * factor, acc.y * factor),
                                                 ptx::pack2<T>(acc.z * factor, acc.w * factor));
      if (p.lse && vector == 0)
        p.lse[row_offset(p, c, token_begin, packed, kv_head, p.lse_stride_token, p.lse_stride_head)] = lse;
    }
  }
}

}  // namespace fi::sm80
