// SPDX-License-Identifier: Apache-2.0
// How the last item of a flat unit to arrive folds its partial states.
#pragma once
#include "epilogue.cuh"

namespace fi::sm80 {

// Folds the parts of a unit by all consumers. The rows of the item that arrived last are the unit's.
template <class Traits>
__device__ __forceinline__ void merge(const AttentionParams& p, const LaunchConstants& c, const Work& w,
                                      int tid, char* shared) {
  if (w.q_rows <= 0) return;  // the device has taken the rows away since they were planned
  const int32_t* parts = reinterpret_cast<const int32_t*>(p.plan + p.layout.parts);
  constexpr int kVectors = MergeSlots<Traits>::kVectors, kLanes = MergeSlots<Traits>::kLanes;
  constexpr int kPasses = ceil_div(kVectors, kLanes), kSlots = MergeSlots<Traits>::kCount;
  const int lane = tid % kLanes, slot = tid / kLanes;
  // Few rows: several slots share the parts of a row.
  int shares = 1;
  if constexpr (!Traits::kInvariant)
    while (shares * 2 * w.q_rows <= kSlots) shares *= 2;
  const int share = slot % shares, rows_at_once = kSlots / shares;
  for (int first_row = 0; first_row < w.q_rows; first_row += rows_at_once) {
    const int row = first_row + slot / shares;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int vector = pass * kLanes + lane;
      const bool valid = row < w.q_rows && vector < kVectors;
      if constexpr (Traits::kInvariant) {
        float lse = -INFINITY;
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int i = w.parts_begin; valid && i < w.parts_end; ++i) {
          float part_lse, a, b, next;
          float4 o;
          load_part<Traits>(p, parts[i] + row, w.kv_head, vector, part_lse, o);
          join(lse, part_lse, a, b, next);
          if (lse == -INFINITY)
            acc = part_lse == -INFINITY ? acc : o;
          else if (part_lse != -INFINITY)
            acc = make_float4(joined(acc.x, a, o.x, b), joined(acc.y, a, o.y, b), joined(acc.z, a, o.z, b),
                              joined(acc.w, a, o.w, b));
          lse = next;
        }
        if (valid)
          store_merged<Traits>(p, c, w.token_begin, w.q_begin + row, w.kv_head, vector, acc, lse, w.request,
                               w.first_pos);
      } else {
        Accumulator sum;
        for (int begin = w.parts_begin + share; valid && begin < w.parts_end; begin += kMergeBatch * shares) {
          // All loads of a batch are in flight together: one after another they would cost 0.3 us a part.
          float lse[kMergeBatch], top = sum.top;
          float4 o[kMergeBatch];
#pragma unroll
          for (int i = 0; i < kMergeBatch; ++i) {
            lse[i] = -INFINITY;
            o[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (begin + i * shares < w.parts_end)
              load_part<Traits>(p, parts[begin + i * shares] + row, w.kv_head, vector, lse[i], o[i]);
          }
#pragma unroll
          for (int i = 0; i < kMergeBatch; ++i) top = fmaxf(top, lse[i]);
          sum.rescale(top);
#pragma unroll
          for (int i = 0; i < kMergeBatch; ++i) sum.add(lse[i], o[i]);
        }
        if (shares > 1) {
          float4* sums = reinterpret_cast<float4*>(shared);
          float2* tops = reinterpret_cast<float2*>(shared + kConsumers * 16);
          if (share > 0) {
            sums[tid] = sum.acc;
            tops[tid] = make_float2(sum.top, sum.sum);
          }
          ptx::named_barrier(1, kConsumers);
          if (share == 0) {
            for (int s = 1; s < shares; ++s) {
              const float2 other = tops[tid + s * kLanes];
              sum.rescale(fmaxf(sum.top, other.x));
              sum.add(other.x, other.y, sums[tid + s * kLanes]);
              if (other.y != other.y) sum.sum = other.y;
            }
          }
          ptx::named_barrier(1, kConsumers);
        }
        if (valid && share == 0)
          store_sum<Traits>(p, c, sum, w.token_begin, w.q_begin + row, w.kv_head, vector, w.request,
                            w.first_pos);
      }
    }
  }
}

}  // namespace fi::sm80
