// SPDX-License-Identifier: Apache-2.0
// The persistent kernel: CTAs draw (item, KV head) tickets, longest first; the last arriver of a merge unit
// folds its partial states. Nobody waits for anybody.
#pragma once
#include "tile.cuh"

namespace fi::sm80 {

__device__ __forceinline__ int64_t out_offset(const AttentionParams& p, const LaunchConstants& c,
                                              int token_begin, int packed, int kv_head, int64_t stride_token,
                                              int64_t stride_head) {
  const int token = c.group.divide(packed);
  return int64_t(token_begin + token) * stride_token +
         int64_t(kv_head * p.group + packed - token * p.group) * stride_head;
}

// A sink joins the state where a row becomes final; returns the factor for o and moves lse (natural log).
__device__ __forceinline__ float add_sink(const AttentionParams& p, int head, float& lse) {
  if (p.sinks == nullptr || lse == -INFINITY) return 1.f;
  const float sink = p.sinks[head];
  const float top = fmaxf(lse, sink);
  const float joined = top + logf(expf(lse - top) + expf(sink - top));
  const float factor = expf(lse - joined);
  lse = joined;
  return factor;
}

// Final rows go through shared memory (the query tile's, free by now) to leave as whole 16-byte chunks;
// partial states are floats and leave as they lie in the fragments.
template <class Traits, int kRows, bool kIndexed>
__device__ __forceinline__ void store(const AttentionParams& p, const LaunchConstants& c, const ItemRange& x,
                                      const WorkItem& item, int kv_head,
                                      TileRunner<Traits, kRows, kIndexed>& runner, char* shared) {
  using Runner = TileRunner<Traits, kRows, kIndexed>;
  using T = typename Traits::T;
  using Tile = typename Traits::template Tile<kRows>;
  const int lane = runner.tid % 32;
  const float v_scale = p.v_scale ? p.v_scale[kv_head * p.v_scale_stride] : 1.f;
  const bool final = item.partial < 0;
  if (final) __syncthreads();
#pragma unroll
  for (int f = 0; f < Runner::kF; ++f)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(runner.state.sum[f][r]);
      const int row = runner.row_of(f, r);
      if (row >= x.q_rows) continue;
      float lse = sum > 0.f ? runner.state.max[f][r] * kLn2 + logf(sum) : -INFINITY;
      float inverse = sum > 0.f ? 1.f / sum : 0.f;
      if (sum != sum) lse = inverse = sum;
      const bool leader = lane % 4 == 0 && runner.warp_kv() == 0;
      const int64_t state = int64_t(item.partial + row) * p.num_kv_heads + kv_head;
      if (final) {
        const int packed = x.q_begin + row;
        const int head = kv_head * p.group + packed - c.group.divide(packed) * p.group;
        inverse *= add_sink(p, head, lse) * v_scale;
        if (p.lse && leader)
          p.lse[out_offset(p, c, x.token_begin, packed, kv_head, p.lse_stride_token, p.lse_stride_head)] =
              lse;
      } else if (leader) {
        p.partial_lse[state] = lse;
      }
#pragma unroll
      for (int n = 0; n < Tile::kWarpBlocksV * 2; ++n) {
        const int block = (n / 2) * Tile::kWarpsKv + runner.warp_kv();
        if (block >= Tile::kBlocksV) break;
        const float lo = runner.out[f][n][2 * r] * inverse, hi = runner.out[f][n][2 * r + 1] * inverse;
        if (final)
          *reinterpret_cast<uint32_t*>(shared + swizzled(kRows, row, block * 2 + n % 2) + (lane % 4) * 4) =
              ptx::pack2<T>(lo, hi);
        else
          *reinterpret_cast<float2*>(p.partial_out + state * Traits::kHeadDimV + block * 16 + (n % 2) * 8 +
                                     (lane % 4) * 2) = make_float2(lo, hi);
      }
    }
  if (!final) return;
  __syncthreads();
  constexpr int kChunks = Traits::kHeadDimV / 8;
  for (int i = runner.tid; i < x.q_rows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    T* o = static_cast<T*>(p.out) +
           out_offset(p, c, x.token_begin, x.q_begin + row, kv_head, p.out_stride_token, p.out_stride_head);
    *reinterpret_cast<uint4*>(o + chunk * 8) =
        *reinterpret_cast<const uint4*>(shared + swizzled(kRows, row, chunk));
  }
}

inline constexpr int kMergeBatch = 8;

// Ordered left fold of the parts of a unit: one warp a row, one lane four columns.
template <class Traits>
__device__ __forceinline__ void merge(const AttentionParams& p, const LaunchConstants& c,
                                      const MergeUnit& unit, int kv_head) {
  using T = typename Traits::T;
  const int32_t* parts = reinterpret_cast<const int32_t*>(p.plan + p.layout.parts);
  const int token_begin = p.qo_indptr[unit.request];
  const int rows = min(unit.q_rows, (p.qo_indptr[unit.request + 1] - token_begin) * p.group - unit.q_begin);
  const float v_scale = p.v_scale ? p.v_scale[kv_head * p.v_scale_stride] : 1.f;
  constexpr int kVectors = Traits::kHeadDimV / 4;
  constexpr int kLanes = kVectors <= 16 ? 16 : 32;
  constexpr int kGroups = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  for (int row = threadIdx.x / kLanes; row < rows; row += kGroups) {
    for (int vector = lane; vector < kVectors; vector += kLanes) {
      float top = -INFINITY, sum = 0.f;
      float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int begin = unit.parts_begin; begin < unit.parts_end; begin += kMergeBatch) {
        // All loads of a batch are in flight together: one after another they would cost 0.3 us a part.
        float lse[kMergeBatch];
        float4 o[kMergeBatch];
#pragma unroll
        for (int i = 0; i < kMergeBatch; ++i) {
          lse[i] = -INFINITY;
          if (begin + i >= unit.parts_end) continue;
          const int64_t state = int64_t(parts[begin + i] + row) * p.num_kv_heads + kv_head;
          lse[i] = __ldcg(p.partial_lse + state);
          o[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + state * Traits::kHeadDimV) + vector);
        }
#pragma unroll
        for (int i = 0; i < kMergeBatch; ++i) {
          if (lse[i] == -INFINITY) continue;
          const float next = fmaxf(top, lse[i]);
          const float a = ptx::exp2_approx((top - next) * kLog2e),
                      b = ptx::exp2_approx((lse[i] - next) * kLog2e);
          acc = make_float4(acc.x * a + o[i].x * b, acc.y * a + o[i].y * b, acc.z * a + o[i].z * b,
                            acc.w * a + o[i].w * b);
          sum = sum * a + b;
          top = next;
        }
      }
      const int packed = unit.q_begin + row;
      const int head = kv_head * p.group + packed - c.group.divide(packed) * p.group;
      float lse = sum > 0.f ? top + logf(sum) : sum == 0.f ? -INFINITY : sum;
      const float inverse = (sum > 0.f ? 1.f / sum : sum) * add_sink(p, head, lse) * v_scale;
      T* o = static_cast<T*>(p.out) +
             out_offset(p, c, token_begin, packed, kv_head, p.out_stride_token, p.out_stride_head) +
             vector * 4;
      *reinterpret_cast<uint2*>(o) = make_uint2(ptx::pack2<T>(acc.x * inverse, acc.y * inverse),
                                                ptx::pack2<T>(acc.z * inverse, acc.w * inverse));
      if (p.lse && vector == 0)
        p.lse[out_offset(p, c, token_begin, packed, kv_head, p.lse_stride_token, p.lse_stride_head)] = lse;
    }
  }
}

template <class Traits, int kRows, bool kIndexed, class Variant>
__device__ __forceinline__ void run_item(const AttentionParams& p, const LaunchConstants& c, int ticket,
                                         const Variant& variant, char* shared) {
  const int index = c.num_kv_heads.divide(ticket), kv_head = ticket - index * p.num_kv_heads;
  const WorkItem item = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items)[index];
  const ItemRange x = exact_range(p, c, item);
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid)::"memory");
  TileRunner<Traits, kRows, kIndexed> runner(tid);
  runner.run(p, c, x, item, kv_head, variant, shared);
  store<Traits, kRows, kIndexed>(p, c, x, item, kv_head, runner, shared);
}

template <class Traits, bool kIndexed, class Variant>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ LaunchConstants c) {
  extern __shared__ __align__(128) char shared[];
  // Behind the tiles: static shared memory would cost an aligned kilobyte, and with it the second CTA an SM.
  volatile int& drawn = reinterpret_cast<int*>(shared + Traits::kSharedBytes - Traits::kMailboxBytes)[0];
  volatile int& arrived = reinterpret_cast<int*>(shared + Traits::kSharedBytes - Traits::kMailboxBytes)[1];
  int32_t* counters = p.counters;
  const auto* header = reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header);
  const auto* items = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items);
  const int tickets = header->num_items * p.num_kv_heads;
  const Variant variant{};
  int ticket = blockIdx.x;
  while (ticket < tickets) {
    if (threadIdx.x == 0) {
      // One draw a ticket, so the draw that returns tickets - 1 is the launch's last and resets the counter.
      const int draws = atomicAdd(counters, 1);
      if (draws == tickets - 1) *counters = 0;
      drawn = int(gridDim.x) + draws;
    }
    switch (items[c.num_kv_heads.divide(ticket)].tile_log2) {
      case 7:
        run_item<Traits, 128, kIndexed>(p, c, ticket, variant, shared);
        break;
      case 6:
        run_item<Traits, 64, kIndexed>(p, c, ticket, variant, shared);
        break;
      case 5:
        run_item<Traits, 32, kIndexed>(p, c, ticket, variant, shared);
        break;
      default:
        run_item<Traits, 16, kIndexed>(p, c, ticket, variant, shared);
        break;
    }
    // Read again rather than kept in registers through the item, where every register counts.
    const int unit_index = __ldcg(&items[c.num_kv_heads.divide(ticket)].unit);
    if (unit_index >= 0) {
      const int kv_head = ticket - c.num_kv_heads.divide(ticket) * p.num_kv_heads;
      const auto unit = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units)[unit_index];
      __threadfence();
      __syncthreads();
      int32_t* counter = counters + 1 + unit_index * p.num_kv_heads + kv_head;
      if (threadIdx.x == 0) arrived = atomicAdd(counter, 1);
      __syncthreads();
      if (arrived == unit.num_items - 1) {
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        merge<Traits>(p, c, unit, kv_head);
      }
    }
    __syncthreads();
    ticket = drawn;
    __syncthreads();
  }
}

}  // namespace fi::sm80
