// SPDX-License-Identifier: Apache-2.0
// What one consumer warp computes: 16 packed query rows against KV tiles, with a softmax state of its own.
// Tiles of fewer rows than the warps could hold spread their KV tiles over warps; nobody waits for another
// warp's arithmetic until the states are combined at the end.
#pragma once
#include "../ptx/ldmatrix.cuh"
#include "softmax.cuh"
#include "work.cuh"

namespace fi::sm80 {

// A tile's address of 16-byte chunk pairs, as ldmatrix wants it from this lane: `base` holds the row and the
// swizzled lower bit of the chunk, and the upper bits of the chunk number are XORed or added.
__device__ __forceinline__ uint32_t chunk_pair(uint32_t base, int rows, int pair) {
  return (base ^ uint32_t((pair & 3) << 5)) + uint32_t((pair >> 2) * rows * kRowBytes);
}

__device__ __forceinline__ int row_groups(const Work& w) { return max(1 << w.tile_log2, 16) / 16; }

template <class Traits>
struct Consumer {
  using T = typename Traits::T;
  using TKV = typename Traits::TKV;
  static constexpr int kQSteps = Traits::kHeadDim / 16;      // ksteps of Q K^T
  static constexpr int kTiles = kKvTile / 8;                 // fragments of a tile's logits
  static constexpr int kBlocks = Traits::kWarpColumns / 16;  // 16-column blocks of the output
  static constexpr int kColumns = kBlocks * 2;               // fragments of the output

  const AttentionParams& p;
  const LaunchConstants& c;
  const Work& w;
  const int warp, lane;
  char* slice;
  int group, member, members;  // row group; which of the warps that share its KV tiles; how many those are
  int column_warp;
  uint32_t q[Traits::kQInRegisters ? kQSteps : 1][4];
  float out[kColumns][4];
  RowState state;

  // Row of the tile that element r (0, 1) of a fragment holds in this lane.
  __device__ __forceinline__ int row_of(int r) const { return group * 16 + lane / 4 + r * 8; }

  __device__ __forceinline__ Consumer(const AttentionParams& p_, const LaunchConstants& c_, const Work& w_,
                                      int tid, char* shared)
      : p(p_), c(c_), w(w_), warp(tid / 32), lane(tid % 32) {
    slice = shared + warp * Traits::kSliceBytes;
    members = Traits::kMaxGroups / row_groups(w);
    column_warp = warp % Traits::kColumnWarps;
    group = warp / Traits::kColumnWarps / members;
    member = warp / Traits::kColumnWarps % members;
    load_queries();
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.f;
    state = RowState{};
  }

  __device__ __forceinline__ void load_queries() {
    constexpr int kChunks = Traits::kHeadDim / 8;  // of 16 bytes, a row
    const T* from = static_cast<const T*>(p.q) + int64_t(w.token_begin) * p.q_stride_token;
    uint4 raw[kChunks / 2];
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (group * 16 + row < w.q_rows) {
        const int packed = w.q_begin + group * 16 + row;
        const int token = c.group.divide(packed), head = w.kv_head * p.group + packed - token * p.group;
        raw[i] = __ldg(reinterpret_cast<const uint4*>(from + int64_t(token) * p.q_stride_token +
                                                      int64_t(head) * p.q_stride_head + chunk * 8));
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
      const uint4 x = raw[i];
      if constexpr (Traits::kFp8) {
        // A fragment of fp8 keys holds four neighbours a lane, so the columns of Q are permuted alike.
        const int block = chunk / 2 * 2, half = chunk % 2 * 8;
        *reinterpret_cast<uint2*>(slice + swizzled(16, row, block) + half) = make_uint2(x.x, x.z);
        *reinterpret_cast<uint2*>(slice + swizzled(16, row, block + 1) + half) = make_uint2(x.y, x.w);
      } else {
        *reinterpret_cast<uint4*>(slice + swizzled(16, row, chunk)) = x;
      }
    }
    __syncwarp();
    if constexpr (Traits::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kQSteps; ++step) read_q(step, q[step]);
    }
  }

  __device__ __forceinline__ void read_q(int step, uint32_t (&a)[4]) const {
    const uint32_t base =
        ptx::shared_address(slice) + (lane % 16) * kRowBytes + (((lane >> 4) ^ (lane & 7)) << 4);
    ptx::ldmatrix_x4(a, chunk_pair(base, 16, step));
  }

  // Logits of the tile's 64 keys.
  __device__ __forceinline__ void logits(uint32_t k_tile, float (&s)[kTiles][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = 0.f;
    // One ldmatrix reads 16 keys x 2 chunks: one kstep of 16-bit elements, two of 8-bit ones.
    constexpr int kStepsRead = Traits::kFp8 ? 2 : 1;
    const int key = (lane & 7) + ((lane >> 4) << 3);
    const uint32_t base = k_tile + key * kRowBytes + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < ceil_div(Traits::kKChunks, 2); ++i) {
      uint32_t b[kTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n)
        ptx::ldmatrix_x4(b[n], chunk_pair(base, kKvTile, i) + n * 16 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kStepsRead; ++j) {
        const int step = i * kStepsRead + j;
        if (step >= kQSteps) continue;
        uint32_t a[4];
        if constexpr (Traits::kQInRegisters) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = q[step][e];
        } else {
          read_q(step, a);
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
          if constexpr (Traits::kFp8) {
            // A register holds four of a key's elements: of one kstep under the permuted order.
            multiply8(s[2 * n], a, b[n][j]);
            multiply8(s[2 * n + 1], a, b[n][2 + j]);
          } else {
            ptx::mma_m16n8k16<T>(s[2 * n], a, b[n][0], b[n][1]);
            ptx::mma_m16n8k16<T>(s[2 * n + 1], a, b[n][2], b[n][3]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ static void multiply8(float (&d)[4], const uint32_t (&a)[4], uint32_t four) {
    if constexpr (Traits::kFp8)
      ptx::mma_m16n8k16<T>(d, a, ptx::widen2<T, TKV>(four), ptx::widen2<T, TKV>(four >> 16));
  }

  __device__ __forceinline__ void transform(int key_begin, float scale, float (&s)[kTiles][4]) {
    const int tile_end = key_begin + kKvTile;
    const bool edge = tile_end > w.kv_end || key_begin < w.lo || (p.causal && tile_end > w.first + 1) ||
                      (p.window_left >= 0 && w.last - key_begin > p.window_left) || kMask;
    if (!edge && !kTransform) return;
    const int first_key = key_begin + (lane % 4) * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = w.q_begin + row_of(r);
      LogitIndex i;
      i.request = w.request;
      i.q_token = c.group.divide(packed);
      i.q_pos = w.first_pos + i.q_token;
      i.kv_head = w.kv_head;
      i.qo_head = w.kv_head * p.group + packed - i.q_token * p.group;
      if (row_of(r) >= w.q_rows) i.q_token = 0;  // nobody looks at the row, but its mask must exist
      const KeyRange visible = Variant::visible_keys(p, i.q_pos, w.kv_end);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          i.kv_pos = first_key + t * 8 + (e & 1);
          float x = s[t][e];
          if constexpr (kTransform) x = Variant::logits_transform<DeviceMath>(p, x * scale, i) * kLog2e;
          bool seen = i.kv_pos >= visible.begin && i.kv_pos < visible.end;
          if constexpr (kMask) seen = seen && Variant::logits_mask(p, i);
          s[t][e] = seen ? x : -INFINITY;
        }
    }
  }

  __device__ __forceinline__ void accumulate(uint32_t v_tile, float scale, float (&s)[kTiles][4]) {
    float shrink[2];
    state.update(scale, s, shrink);
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
    // One ldmatrix reads 16 keys x 16 columns, or 32 keys x 16 columns of one byte.
    constexpr int kSteps = Traits::kFp8 ? 2 : 1;
    const int keys = Traits::kFp8 ? lane : lane % 16;
    const uint32_t base = v_tile + keys * kRowBytes;
#pragma unroll
    for (int t = 0; t < kKvTile / 16; t += kSteps) {
      uint32_t a[kSteps][4];
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&f)[4] = s[2 * (t + j) + half];
          a[j][2 * half] = ptx::pack2<T>(f[0], f[1]);
          a[j][2 * half + 1] = ptx::pack2<T>(f[2], f[3]);
        }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int block = column_warp * kBlocks + n;
        const int chunk = Traits::kFp8 ? block : block * 2 + (lane >> 4);
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, base + t * 16 * kRowBytes + (chunk >> 3) * (kKvTile * kRowBytes) +
                                      (((chunk & 7) ^ (lane & 7)) << 4));
        if constexpr (Traits::kFp8) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            // Even and odd columns part: fragment 2 n holds columns 0, 2, .. 14 of the block.
            const uint32_t even = __byte_perm(b[2 * j], b[2 * j + 1], 0x6420);
            const uint32_t odd = __byte_perm(b[2 * j], b[2 * j + 1], 0x7531);
            multiply8(out[2 * n], a[j], even);
            multiply8(out[2 * n + 1], a[j], odd);
          }
        } else {
          ptx::mma_m16n8k16<T>(out[2 * n], a[0], b[0], b[1]);
          ptx::mma_m16n8k16<T>(out[2 * n + 1], a[0], b[2], b[3]);
        }
      }
    }
  }

  // One tile of keys, at `stage` of the ring.
  __device__ __forceinline__ void step(uint32_t stage, int key_begin, float scale) {
    float s[kTiles][4];
    logits(stage, s);
    transform(key_begin, scale, s);
    accumulate(stage + Traits::kKBytes, kTransform ? 1.f : scale * kLog2e, s);
  }
};

}  // namespace fi::sm80
