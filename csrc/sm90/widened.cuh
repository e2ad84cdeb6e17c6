// SPDX-License-Identifier: Apache-2.0
// Tiles of 128 packed rows over fp8 caches on Hopper. wgmma multiplies elements of one type, so all consumers
// widen a tile to the queries' type in shared memory, once for all rows, while the products of the tiles
// before it run.
#pragma once
#include "wide.cuh"

namespace fi::sm90 {

template <class Traits>
struct Widened {
  using Products = Wide<Traits>;
  using Consumer = sm80::Consumer<Traits>;
  using Ring = sm80::Ring<Traits::kStages>;
  static constexpr int kKvTile = Traits::kKvTile;
  static constexpr int kTiles = Consumer::kTiles, kVSteps = Products::kVSteps;

  // What all consumers have widened is there, and all products that were waited for have read theirs.
  __device__ __forceinline__ static void sync() { ptx::named_barrier(sm80::kWideBarrier, sm80::kConsumers); }

  // All tiles of an item, the first being at `ring` of the pipeline. While the keys of tile i and the values
  // of i - 1 are multiplied, the values of i and the keys of i + 1 are widened, so that two buffers of each
  // are enough.
  __device__ __forceinline__ static void attend(Consumer& x, sm80::Control& control, uint32_t stages,
                                                Ring ring, int tiles) {
    if (tiles == 0) return;
    const float scale = x.logit_scale();
    const float factor = sm80::kTransform ? 1.f : scale * sm80::kLog2e;
    float s[kTiles][4], shrink[2];
    uint32_t weights[kVSteps][4];
    // The buffer of the tile whose keys are multiplied next, and the other one.
    uint32_t now = stages - Traits::kWidenedBytes, other = now + Traits::kBufferBytes;
    int key = x.w.kv_begin;
    // Behind the last barrier of an item nobody multiplies keys any more; values are not touched before the
    // next one.
    widen_keys(x, control, stages, ring, now);
    sync();
    ptx::wgmma_fence();
    start_logits(s, x, now);
    widen_values(x, control, stages, ring, now);
    ring.advance();
    if (tiles > 1) widen_keys(x, control, stages, ring, other);
    ptx::wgmma_wait<0>();
    ptx::settle(s);
    x.transform(key, scale, s);
    Products::weigh(x, factor, s, shrink);
    Products::pack(s, weights);
#pragma unroll 1
    for (int left = tiles - 1; left > 0; --left) {
      key += kKvTile;
      sync();
      ptx::wgmma_fence();
      start_logits(s, x, other);
      start_values(x, weights, now);
      widen_values(x, control, stages, ring, other);
      ring.advance();
      if (left > 1) widen_keys(x, control, stages, ring, now);
      ptx::wgmma_wait<1>();
      ptx::settle(s);
      x.transform(key, scale, s);
      Products::weigh(x, factor, s, shrink);
      Products::hold(x.state.sum[0] + x.state.sum[1]);
      ptx::wgmma_wait<0>();
      ptx::settle(x.out);
      ptx::settle(weights);
      Products::rescale(x, shrink);
      Products::pack(s, weights);
      const uint32_t before = now;
      now = other;
      other = before;
    }
    sync();
    ptx::wgmma_fence();
    start_values(x, weights, now);
    ptx::wgmma_wait<0>();
    ptx::settle(x.out);
  }

 private:
  __device__ __forceinline__ static void start_logits(float (&s)[kTiles][4], const Consumer& x,
                                                      uint32_t buffer) {
    Products::multiply_keys(s, x, Products::uniform(Products::keys_at(buffer)));
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ static void start_values(Consumer& x, const uint32_t (&weights)[kVSteps][4],
                                                      uint32_t buffer) {
    Products::template multiply_values<0>(
        x.out, weights, Products::uniform(Products::keys_at(buffer)) + Products::kValuesBehindKeys);
    ptx::wgmma_commit();
  }

  // This thread's share of the keys of the tile at `ring`, once they have come.
  __device__ __forceinline__ static void widen_keys(const Consumer& x, sm80::Control& control,
                                                    uint32_t stages, const Ring& ring, uint32_t buffer) {
    ptx::mbarrier_wait(sm80::full_barrier(control, ring), ring.lap >> 1 & 1);
    widen_rows<typename Traits::T, Traits::kHeadDim / 16>(x.warp * 32 + x.lane,
                                                          stages + ring.at * Traits::kStageBytes, buffer);
    ptx::fence_async_shared();
  }

  // The same of its values, whose keys have been widened; then the stage is free.
  __device__ __forceinline__ static void widen_values(const Consumer& x, sm80::Control& control,
                                                      uint32_t stages, const Ring& ring, uint32_t buffer) {
    widen_rows<typename Consumer::Weight, Traits::kHeadDimV / 16>(
        x.warp * 32 + x.lane, stages + ring.at * Traits::kStageBytes + Traits::kNarrowKBytes,
        buffer + Traits::kKBytes);
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[ring.at]), x.lane);
    ptx::fence_async_shared();
  }

  // To elements of type T; kChunks of 16 a row.
  template <typename T, int kChunks>
  __device__ __forceinline__ static void widen_rows(int tid, uint32_t from, uint32_t to) {
    const char* narrow = static_cast<const char*>(__cvta_shared_to_generic(from));
    char* wide = static_cast<char*>(__cvta_shared_to_generic(to));
#pragma unroll
    for (int first = 0; first < kKvTile * kChunks; first += sm80::kConsumers) {
      const int i = first + tid, row = i / kChunks, chunk = i % kChunks;
      if (kKvTile * kChunks % sm80::kConsumers != 0 && i >= kKvTile * kChunks) break;
      const uint4 x = *reinterpret_cast<const uint4*>(narrow + sm80::swizzled(kKvTile, row, chunk));
      const uint4 left = widen8<T>(x.x, x.y), right = widen8<T>(x.z, x.w);
      // Lanes whose chunks lie in the second 128 bytes of a row begin with the other half: the banks differ.
      const bool swap = chunk >= 4;
      const int half = 2 * chunk + swap;
      *reinterpret_cast<uint4*>(wide + sm80::swizzled(kKvTile, row, half)) = swap ? right : left;
      *reinterpret_cast<uint4*>(wide + sm80::swizzled(kKvTile, row, half ^ 1)) = swap ? left : right;
    }
  }

  template <typename T>
  __device__ __forceinline__ static uint4 widen8(uint32_t a, uint32_t b) {
    using Narrow = typename Traits::Narrow;
    return make_uint4(ptx::widen2<T, Narrow>(a), ptx::widen2<T, Narrow>(a >> 16), ptx::widen2<T, Narrow>(b),
                      ptx::widen2<T, Narrow>(b >> 16));
  }
};

}  // namespace fi::sm90
