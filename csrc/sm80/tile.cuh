// SPDX-License-Identifier: Apache-2.0
// One work item: a query tile against a range of keys.
#pragma once
#include "../core/params.h"
#include "../ptx/ldmatrix.cuh"
#include "loader.cuh"
#include "softmax.cuh"

namespace fi::sm80 {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// What an item turns into once the exact lengths are known.
struct ItemRange {
  int token_begin;  // first query token of the request
  int q_rows;       // packed rows that exist
  int q_begin;
  int first_pos;  // position of query token 0 of the request
  int kv_begin, kv_end;
  int lo;           // first key that any row of the tile may see
  int first, last;  // positions of the first and last row
};

__device__ __forceinline__ ItemRange exact_range(const AttentionParams& p, const LaunchConstants& c,
                                                 const WorkItem& item) {
  ItemRange x;
  x.token_begin = p.qo_indptr[item.request];
  const int q_len = p.qo_indptr[item.request + 1] - x.token_begin;
  const int kv_len = p.level.kv_lens[item.request];
  x.q_begin = item.q_begin;
  x.q_rows = min(int(item.q_rows), q_len * p.group - item.q_begin);
  x.first_pos = kv_len - q_len;
  x.first = x.first_pos + c.group.divide(item.q_begin);
  x.last = x.first_pos + c.group.divide(item.q_begin + max(x.q_rows, 1) - 1);
  x.kv_end = min(item.kv_end, kv_len);
  if (p.causal) x.kv_end = min(x.kv_end, x.last + 1);
  x.kv_begin = item.kv_begin;
  x.lo = 0;
  if (p.window_left >= 0) {
    x.lo = max(0, x.first - p.window_left);
    if (item.flags & kFirstChunk) x.kv_begin = min(x.kv_begin, x.lo / kKvTile * kKvTile);
  }
  return x;
}

template <class Traits, int kRows, bool kIndexed>
struct TileRunner {
  using T = typename Traits::T;
  using Tile = typename Traits::template Tile<kRows>;
  static constexpr int kF = Tile::kFragments;
  static constexpr int kKeyTiles = Tile::kStep / 8;

  const int tid;
  float out[kF][Tile::kWarpBlocksV * 2][4];
  RowState<kF> state;

  __device__ __forceinline__ explicit TileRunner(int tid_) : tid(tid_) {}

  __device__ __forceinline__ int warp_q() const { return (tid / 32) / Tile::kWarpsKv; }
  __device__ __forceinline__ int warp_kv() const { return (tid / 32) % Tile::kWarpsKv; }
  // Row of the tile that element r (0, 1) of fragment f holds in this lane.
  __device__ __forceinline__ int row_of(int f, int r) const {
    return (warp_q() * kF + f) * 16 + (tid % 32) / 4 + r * 8;
  }

  __device__ __forceinline__ void load_q(const AttentionParams& p, const LaunchConstants& c,
                                         const ItemRange& x, int kv_head, uint32_t q_tile) {
    constexpr int kChunks = Traits::kHeadDim / 8;
    const char* q = static_cast<const char*>(p.q);
#pragma unroll 4
    for (int i = tid; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int packed = x.q_begin + min(row, x.q_rows - 1);
      const int token = c.group.divide(packed), head = kv_head * p.group + packed - token * p.group;
      const int64_t offset =
          int64_t(x.token_begin + token) * p.q_stride_token + int64_t(head) * p.q_stride_head + chunk * 8;
      ptx::cp_async_16(q_tile + swizzled(kRows, row, chunk), q + offset * int64_t(sizeof(T)),
                       row < x.q_rows ? 16 : 0);
    }
  }

  // Logits of this warp's rows and keys [warp_kv * kKeys, +kKeys) of the tile.
  __device__ __forceinline__ void logits(uint32_t q_tile, uint32_t k_tile, int first_key,
                                         float (&s)[kF][Tile::kKeys / 8][4]) {
    const int lane = tid % 32;
#pragma unroll
    for (int f = 0; f < kF; ++f)
#pragma unroll
      for (int t = 0; t < Tile::kKeys / 8; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[f][t][e] = 0.f;
    // The fragments of a step are read while the previous step multiplies.
    constexpr int kSteps = Traits::kHeadDim / 16, kPairs = Tile::kKeys / 16;
    uint32_t a[2][kF][4], b[2][kPairs][4];
    const auto read = [&](int step, int buffer) {
#pragma unroll
      for (int f = 0; f < kF; ++f)
        ptx::ldmatrix_x4(a[buffer][f], q_tile + swizzled(kRows, (warp_q() * kF + f) * 16 + lane % 16,
                                                         step * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int key = first_key + warp_kv() * Tile::kKeys + n * 16 + (lane & 7) + ((lane >> 4) << 3);
        ptx::ldmatrix_x4(b[buffer][n], k_tile + swizzled(kKvTile, key, step * 2 + ((lane >> 3) & 1)));
      }
    };
    read(0, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) read(step + 1, (step + 1) % 2);
#pragma unroll
      for (int n = 0; n < kPairs; ++n)
#pragma unroll
        for (int f = 0; f < kF; ++f) {
          ptx::mma_m16n8k16<T>(s[f][2 * n], a[step % 2][f], b[step % 2][n][0], b[step % 2][n][1]);
          ptx::mma_m16n8k16<T>(s[f][2 * n + 1], a[step % 2][f], b[step % 2][n][2], b[step % 2][n][3]);
        }
    }
  }

  template <class Variant>
  __device__ __forceinline__ void transform(const AttentionParams& p, const LaunchConstants& c,
                                            const ItemRange& x, const Variant& variant, int key_begin,
                                            float (&s)[kF][Tile::kKeys / 8][4]) {
    const int lane = tid % 32;
    const int tile_end = key_begin + Tile::kStep;
    const bool masked = tile_end > x.kv_end || (p.causal && tile_end > x.first + 1) ||
                        (p.window_left >= 0 && x.last - key_begin > p.window_left) || Variant::kAlwaysMask;
    if (!masked && !Variant::kTransform) return;
#pragma unroll
    for (int f = 0; f < kF; ++f)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int packed = x.q_begin + row_of(f, r);
        const int token = c.group.divide(packed), pos = x.first_pos + token;
        const int head = packed - token * p.group;
#pragma unroll
        for (int t = 0; t < Tile::kKeys / 8; ++t)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            const int key = key_begin + warp_kv() * Tile::kKeys + t * 8 + (lane % 4) * 2 + (e & 1);
            float logit = s[f][t][e];
            if constexpr (Variant::kTransform)
              logit = variant.transform(p, logit * p.scale, token, pos, key, head) * kLog2e;
            bool visible = key < x.kv_end && key >= x.lo;
            if (p.causal) visible = visible && key <= pos;
            if (p.window_left >= 0) visible = visible && pos - key <= p.window_left;
            if constexpr (Variant::kAlwaysMask)
              visible = visible && variant.visible(p, token, pos, key, head);
            s[f][t][e] = visible ? logit : -INFINITY;
          }
      }
  }

  // Tiles whose keys are spread over warps: everyone gets all logits of its rows in the layout that a
  // single warp would hold, so that a row's bits do not depend on the tile's height.
  __device__ __forceinline__ void exchange(float* logits, const float (&mine)[kF][Tile::kKeys / 8][4],
                                           float (&all)[kKeyTiles][4]) {
    static_assert(kF == 1);
    const int lane = tid % 32;
#pragma unroll
    for (int t = 0; t < Tile::kKeys / 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(logits + row_of(0, r) * Tile::kLogitStride + warp_kv() * Tile::kKeys +
                                   t * 8 + (lane % 4) * 2) =
            make_float2(mine[0][t][2 * r], mine[0][t][2 * r + 1]);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = *reinterpret_cast<const float2*>(logits + row_of(0, r) * Tile::kLogitStride +
                                                             t * 8 + (lane % 4) * 2);
        all[t][2 * r] = pair.x;
        all[t][2 * r + 1] = pair.y;
      }
  }

  __device__ __forceinline__ void accumulate(uint32_t v_tile, int first_key, float scale,
                                             float (&s)[kF][kKeyTiles][4]) {
    const int lane = tid % 32;
    constexpr int kSteps = Tile::kStep / 16, kBlocks = Tile::kWarpBlocksV;
    uint32_t b[2][4];
    const auto read = [&](int t, int buffer) {
      const int block = t % kBlocks * Tile::kWarpsKv + warp_kv();
      ptx::ldmatrix_x4_trans(b[buffer], v_tile + swizzled(kKvTile, first_key + t / kBlocks * 16 + lane % 16,
                                                          block * 2 + lane / 16));
    };
    read(0, 0);
    float shrink[kF][2];
    state.update(scale, s, shrink);
#pragma unroll
    for (int f = 0; f < kF; ++f)
#pragma unroll
      for (int n = 0; n < kBlocks * 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[f][n][e] *= shrink[f][e / 2];
    uint32_t a[kF][4];
#pragma unroll
    for (int t = 0; t < kSteps * kBlocks; ++t) {
      const int step = t / kBlocks, n = t % kBlocks;
      if (t + 1 < kSteps * kBlocks) read(t + 1, (t + 1) % 2);
      if (n == 0) {
#pragma unroll
        for (int f = 0; f < kF; ++f)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            a[f][2 * half] = ptx::pack2<T>(s[f][2 * step + half][0], s[f][2 * step + half][1]);
            a[f][2 * half + 1] = ptx::pack2<T>(s[f][2 * step + half][2], s[f][2 * step + half][3]);
          }
      }
      if (Tile::kBlocksV % Tile::kWarpsKv && n * Tile::kWarpsKv + warp_kv() >= Tile::kBlocksV) continue;
#pragma unroll
      for (int f = 0; f < kF; ++f) {
        ptx::mma_m16n8k16<T>(out[f][2 * n], a[f], b[t % 2][0], b[t % 2][1]);
        ptx::mma_m16n8k16<T>(out[f][2 * n + 1], a[f], b[t % 2][2], b[t % 2][3]);
      }
    }
  }

  // Runs over keys [kv_begin, kv_end); leaves the unnormalised output and the row states.
  template <class Variant>
  __device__ __forceinline__ void run(const AttentionParams& p, const LaunchConstants& c, const ItemRange& x,
                                      const WorkItem& item, int kv_head, const Variant& variant,
                                      char* shared) {
#pragma unroll
    for (int f = 0; f < kF; ++f)
#pragma unroll
      for (int n = 0; n < Tile::kWarpBlocksV * 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[f][n][e] = 0.f;
    const int tiles = x.kv_end > x.kv_begin ? (x.kv_end - x.kv_begin + kKvTile - 1) / kKvTile : 0;
    if (tiles == 0 || x.q_rows <= 0) return;

    const uint32_t q_tile = ptx::shared_address(shared);
    float* exchange_buffer = reinterpret_cast<float*>(shared + Tile::kQBytes);
    const uint32_t stages = q_tile + Tile::kFixedBytes;
    const auto k_tile = [&](int stage) { return stages + stage * Traits::kStageBytes; };
    KvLoader<Traits, kIndexed> loader(p, c, tid, item.request, kv_head, x.lo, x.kv_end);

    loader.look_up(x.kv_begin);
    load_q(p, c, x, kv_head, q_tile);
    const float scale = (Variant::kTransform ? 1.f : p.scale) * kLog2e;
    // One loop fills the pipeline and works it off: a second copy of the loader would be more instructions
    // to fetch, and a short item is bound by that.
    int stage = 0, next = 0;
#pragma unroll 1
    for (int i = 1 - Tile::kStages; i < tiles; ++i) {
      if (i >= 0) {
        ptx::cp_async_wait<Tile::kStages - 2>();
        __syncthreads();
      }
      if (i + Tile::kStages - 1 < tiles) {
        loader.copy(k_tile(next), k_tile(next) + Traits::kKBytes);
        loader.look_up(x.kv_begin + (i + Tile::kStages) * kKvTile);
      }
      ptx::cp_async_commit();
      next = next + 1 == Tile::kStages ? 0 : next + 1;
      if (i < 0) continue;
#pragma unroll 1
      for (int first_key = 0; first_key < kKvTile; first_key += Tile::kStep) {
        float s[kF][Tile::kKeys / 8][4];
        logits(q_tile, k_tile(stage), first_key, s);
        transform(p, c, x, variant, x.kv_begin + i * kKvTile + first_key, s);
        if constexpr (Tile::kWarpsKv > 1) {
          float all[1][kKeyTiles][4];
          exchange(exchange_buffer, s, all[0]);
          accumulate(k_tile(stage) + Traits::kKBytes, first_key, scale, all);
        } else {
          accumulate(k_tile(stage) + Traits::kKBytes, first_key, scale, s);
        }
      }
      stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    }
    ptx::cp_async_wait<0>();
  }
};

}  // namespace fi::sm80
