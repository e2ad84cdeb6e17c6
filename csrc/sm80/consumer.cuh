// SPDX-License-Identifier: Apache-2.0
// One work item: a query tile against a range of keys, by the eight consumer warps.
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

template <class Traits, int kRows>
struct Consumer {
  using T = typename Traits::T;
  using TKV = typename Traits::TKV;
  using S = Split<Traits, kRows>;
  static constexpr int kQSteps = Traits::kHeadDim / 16;  // ksteps of Q K^T
  static constexpr int kTiles = kKvTile / 8;             // fragments of all logits of a row group
  static constexpr int kColumns = S::kWarpBlocks * 2;    // fragments of this warp's output columns

  const AttentionParams& p;
  const LaunchConstants& c;
  const Work& w;
  const int tid, lane;
  char* slice;       // of this row group: queries, then results
  float* logits_at;  // two exchange buffers of this row group
  uint32_t q[S::kQInRegisters ? kQSteps : 1][4];
  float out[kColumns][4];
  RowState state;

  __device__ __forceinline__ int group() const { return tid / 32 / S::kWarps; }
  __device__ __forceinline__ int member() const { return tid / 32 % S::kWarps; }
  __device__ __forceinline__ int row_of(int r) const { return group() * 16 + lane / 4 + r * 8; }

  __device__ __forceinline__ Consumer(const AttentionParams& p_, const LaunchConstants& c_, const Work& w_,
                                      int tid_, char* shared)
      : p(p_), c(c_), w(w_), tid(tid_), lane(tid_ % 32) {
    slice = shared + group() * Traits::kSliceBytes;
    logits_at = reinterpret_cast<float*>(shared + Traits::kQBytes) + group() * 16 * kLogitStride;
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.f;
    state = RowState{};
  }

  // Barrier among the warps that share a row group.
  __device__ __forceinline__ void sync_group() const {
    if constexpr (S::kWarps == 1)
      __syncwarp();
    else
      ptx::named_barrier(2 + group(), S::kWarps * 32);
  }

  __device__ __forceinline__ void load_q() {
    constexpr int kChunks = Traits::kHeadDim / 8;
    const T* from = static_cast<const T*>(p.q);
    sync_group();  // the previous item's results have left the slice
#pragma unroll 2
    for (int i = tid % (S::kWarps * 32); i < 16 * kChunks; i += S::kWarps * 32) {
      const int row = i / kChunks, chunk = i % kChunks, tile_row = group() * 16 + row;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (tile_row < w.q_rows) {
        const int packed = w.q_begin + tile_row;
        const int token = c.group.divide(packed), head = w.kv_head * p.group + packed - token * p.group;
        x = __ldg(reinterpret_cast<const uint4*>(from + int64_t(w.token_begin + token) * p.q_stride_token +
                                                 int64_t(head) * p.q_stride_head + chunk * 8));
      }
      if constexpr (Traits::kFp8) {
        // A fragment of fp8 keys holds four neighbours a lane, so the columns of Q are permuted alike.
        const int block = chunk / 2 * 2, half = chunk % 2 * 8;
        char* at = slice + swizzled(16, row, block) + half;
        char* far = slice + swizzled(16, row, block + 1) + half;
        *reinterpret_cast<uint2*>(at) = make_uint2(x.x, x.z);
        *reinterpret_cast<uint2*>(far) = make_uint2(x.y, x.w);
      } else {
        *reinterpret_cast<uint4*>(slice + swizzled(16, row, chunk)) = x;
      }
    }
    sync_group();
    if constexpr (S::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kQSteps; ++step) read_q(step, q[step]);
    }
  }

  __device__ __forceinline__ void read_q(int step, uint32_t (&a)[4]) const {
    const uint32_t base =
        ptx::shared_address(slice) + (lane % 16) * kRowBytes + (((lane >> 4) ^ (lane & 7)) << 4);
    ptx::ldmatrix_x4(a, chunk_pair(base, 16, step));
  }

  // Logits of this warp's keys: fragment t holds keys 8 t .. 8 t + 7 of its share.
  __device__ __forceinline__ void logits(uint32_t k_tile, float (&s)[S::kKeys / 8][4]) {
#pragma unroll
    for (int t = 0; t < S::kKeys / 8; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = 0.f;
    const int first_key = S::kExchange ? member() * S::kKeys : 0;
    // One ldmatrix reads 16 keys x 2 chunks, or 8 keys x 4 chunks.
    constexpr bool kEight = S::kKeys == 8;
    constexpr int kChunksRead = kEight ? 4 : 2, kStepsRead = kChunksRead * (Traits::kFp8 ? 2 : 1) / 2;
    constexpr int kReads = ceil_div(Traits::kKChunks, kChunksRead), kNs = kEight ? 1 : S::kKeys / 16;
    const int key = first_key + (kEight ? lane & 7 : (lane & 7) + ((lane >> 4) << 3));
    const uint32_t low =
        kEight ? uint32_t((lane >> 3) ^ (lane & 7)) : uint32_t(((lane >> 3) & 1) ^ (lane & 7));
    const uint32_t base = k_tile + key * kRowBytes + (low << 4);
    const auto read = [&](int i, int n, uint32_t (&b)[4]) {
      ptx::ldmatrix_x4(b, chunk_pair(base, kKvTile, kEight ? i * 2 : i) + n * 16 * kRowBytes);
    };
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      uint32_t b[kNs][4];
#pragma unroll
      for (int n = 0; n < kNs; ++n) read(i, n, b[n]);
#pragma unroll
      for (int j = 0; j < kStepsRead; ++j) {
        const int step = i * kStepsRead + j;
        if (step >= kQSteps) continue;
        uint32_t a[4];
        if constexpr (S::kQInRegisters) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = q[step][e];
        } else {
          read_q(step, a);
        }
#pragma unroll
        for (int n = 0; n < kNs; ++n) {
          if constexpr (Traits::kFp8) {
            // A register holds four of a key's elements: of one kstep under the permuted order.
            multiply8(s[kEight ? 0 : 2 * n], a, b[n][j]);
            if constexpr (!kEight) multiply8(s[2 * n + 1], a, b[n][2 + j]);
          } else if constexpr (kEight) {
            ptx::mma_m16n8k16<T>(s[0], a, b[0][2 * j], b[0][2 * j + 1]);
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

  __device__ __forceinline__ void transform(int key_begin, float scale, float (&s)[S::kKeys / 8][4]) {
    const int tile_end = key_begin + kKvTile;
    const bool edge = tile_end > w.kv_end || key_begin < w.lo || (p.causal && tile_end > w.first + 1) ||
                      (p.window_left >= 0 && w.last - key_begin > p.window_left) || kMask;
    if (!edge && !kTransform) return;
    const int first_key = key_begin + (S::kExchange ? member() * S::kKeys : 0) + (lane % 4) * 2;
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
      for (int t = 0; t < S::kKeys / 8; ++t)
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

  // Everyone gets all logits of its rows in the layout that a single warp would hold.
  __device__ __forceinline__ void exchange(int buffer, const float (&mine)[S::kKeys / 8][4],
                                           float (&all)[kTiles][4]) {
    float* at = logits_at + buffer * (Traits::kLogitBytes / 4) + (lane / 4) * kLogitStride + (lane % 4) * 2;
#pragma unroll
    for (int t = 0; t < S::kKeys / 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(at + r * 8 * kLogitStride + member() * S::kKeys + t * 8) =
            make_float2(mine[t][2 * r], mine[t][2 * r + 1]);
    sync_group();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = *reinterpret_cast<const float2*>(at + r * 8 * kLogitStride + t * 8);
        all[t][2 * r] = pair.x;
        all[t][2 * r + 1] = pair.y;
      }
  }

  // 16-column block n of this warp; the blocks of a warp are neighbours.
  __device__ __forceinline__ int block_of(int n) const { return member() * S::kWarpBlocks + n; }

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
      for (int n = 0; n < S::kWarpBlocks; ++n) {
        const int block = block_of(n);
        if (S::kWarpBlocks * S::kWarps > S::kBlocks && block >= S::kBlocks) continue;
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

  // Column, within its block, of element e of fragment 2 n + h.
  __device__ __forceinline__ int column(int h, int e) const {
    return Traits::kFp8 ? (lane % 4) * 4 + 2 * (e & 1) + h : h * 8 + (lane % 4) * 2 + (e & 1);
  }

  // One tile of keys in pipeline stage `stage`.
  __device__ __forceinline__ void step(uint32_t stage, int key_begin, int buffer, float scale) {
    const float softmax_scale = kTransform ? 1.f : scale * kLog2e;
    float s[S::kKeys / 8][4];
    logits(stage, s);
    transform(key_begin, scale, s);
    if constexpr (S::kExchange) {
      float all[kTiles][4];
      exchange(buffer, s, all);
      accumulate(stage + Traits::kKBytes, softmax_scale, all);
    } else {
      accumulate(stage + Traits::kKBytes, softmax_scale, s);
    }
  }
};

}  // namespace fi::sm80
