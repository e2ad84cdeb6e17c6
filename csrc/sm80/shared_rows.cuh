// SPDX-License-Identifier: Apache-2.0
// Tiles of few rows in the batch-invariant mode, where warps must not take tiles of their own: they share
// each one. A warp multiplies some of its keys, all exchange their logits, and each multiplies some columns
// of the values. Every element is the same chain of products as in one warp, so that its bits are those of
// tiles of any height.
#pragma once
#include "epilogue.cuh"
#include "grid_state.cuh"

namespace fi::sm80 {

// Where fragments of the queries leave the slices free for logits.
template <class Traits>
inline constexpr bool kSharesRows = FI_SHARED_ROWS && Traits::kInvariant && Traits::kQInRegisters &&
                                    Traits::kColumnWarps == 1 && !kTransformsTiles;

// What one of the warps computes of a row group that all of them share.
template <class Traits>
struct SharedRows {
  using T = typename Traits::T;
  using C = Consumer<Traits>;
  static constexpr int kMembers = Traits::kMaxGroups;
  static constexpr int kTiles = C::kTiles;                                 // fragments of a tile's logits
  static constexpr int kMine = kTiles > kMembers ? kTiles / kMembers : 1;  // of those, this warp's
  static constexpr int kBlocks = ceil_div(C::kBlocks, kMembers);           // this warp's blocks of 16 columns
  static constexpr int kPitch = Traits::kKvTile + 8;                       // floats of a row of logits
  static_assert(2 * 16 * kPitch * 4 <= Traits::kQBytes, "logits lie where queries were");

  C& x;
  float* const logits;           // of two tiles, by turns
  float out[2 * kBlocks][4];     // of this grid chunk
  GridState<2 * kBlocks> whole;  // of those before it

  __device__ __forceinline__ SharedRows(C& x_, char* shared)
      : x(x_), logits(reinterpret_cast<float*>(shared)) {
    clear();
    sync();  // no warp still reads its queries there
  }

  __device__ __forceinline__ static void sync() { ptx::named_barrier(1, kConsumers); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.f;
    x.state = RowState{};
  }

  __device__ __forceinline__ int block(int n) const { return x.member * kBlocks + n; }

  // Column of element e of fragment n in this lane's rows.
  __device__ __forceinline__ int column(int n, int e) const {
    const int within = Traits::kFp8 ? (x.lane % 4) * 4 + 2 * e + n % 2 : n % 2 * 8 + (x.lane % 4) * 2 + e;
    return block(n / 2) * 16 + within;
  }

  // The tile at `stage`: the `turn`-th of the item.
  __device__ __forceinline__ void step(uint32_t stage, int turn, int key_begin, float scale) {
    float* const s_tile = logits + turn % 2 * (16 * kPitch);
    float* const s_row = s_tile + x.lane / 4 * kPitch + x.lane % 4 * 2;
    if (x.member * kMine < kTiles) {
#pragma unroll
      for (int t = 0; t < kMine; ++t) {
        const int first = (x.member * kMine + t) * 8;
        float s[4] = {0.f, 0.f, 0.f, 0.f};
        multiply_keys(stage, first, s);
        *reinterpret_cast<float2*>(s_row + first) = make_float2(s[0], s[1]);
        *reinterpret_cast<float2*>(s_row + 8 * kPitch + first) = make_float2(s[2], s[3]);
      }
    }
    sync();
    float s[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 upper = *reinterpret_cast<const float2*>(s_row + t * 8);
      const float2 lower = *reinterpret_cast<const float2*>(s_row + 8 * kPitch + t * 8);
      s[t][0] = upper.x, s[t][1] = upper.y, s[t][2] = lower.x, s[t][3] = lower.y;
    }
    x.transform(key_begin, scale, s);
    weigh(kTransform ? 1.f : scale * kLog2e, s);
    multiply_values(stage + Traits::kKBytes, s);
  }

  // Logits of eight keys: ksteps in the order of Consumer::logits(). One ldmatrix reads four chunks of 16
  // bytes.
  __device__ __forceinline__ void multiply_keys(uint32_t k_tile, int first, float (&s)[4]) const {
    constexpr int kStepsRead = Traits::kFp8 ? 4 : 2, kRowChunks = Traits::kKChunks;
    const int key = first + (x.lane & 7);
#pragma unroll
    for (int begin = 0; begin < kRowChunks; begin += 4) {
      const int chunk = min(begin + (x.lane >> 3), kRowChunks - 1);
      uint32_t b[4];
      ptx::ldmatrix_x4(b, k_tile + swizzled(Traits::kKvTile, key, chunk));
#pragma unroll
      for (int j = 0; j < kStepsRead; ++j) {
        const int step = begin / 4 * kStepsRead + j;
        if (step >= C::kQSteps) continue;
        if constexpr (Traits::kFp8)
          C::template multiply8<T>(s, x.q[step], b[j]);
        else
          ptx::mma_m16n8k16<T>(s, x.q[step], b[2 * j], b[2 * j + 1]);
      }
    }
  }

  __device__ __forceinline__ void weigh(float scale, float (&s)[kTiles][4]) {
    if constexpr (!Variant::kSoftmax) return;
    float shrink[2];
    x.state.template update<typename C::Weight>(scale, s, shrink);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
  }

  __device__ __forceinline__ void multiply_values(uint32_t v_tile, const float (&s)[kTiles][4]) {
    constexpr int kSteps = Traits::kFp8 ? 2 : 1;  // of 16 keys, that one ldmatrix reads
#pragma unroll
    for (int t = 0; t < kTiles / 2; t += kSteps) {
      uint32_t a[kSteps][4];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) C::weights_fragment(s, t + j, a[j]);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        if (block(n) >= C::kBlocks) continue;
        uint32_t b[4];
        C::read_values(b, v_tile + t * 16 * kRowBytes, block(n), x.lane);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) C::multiply_values(out[2 * n], out[2 * n + 1], a[j], b, j);
      }
    }
  }

  __device__ __forceinline__ void fold() {
    whole.fold(x.state, out);
    clear();
  }

  // The grid chunks so far become the result.
  __device__ __forceinline__ void take_whole(float (&lse)[2]) { whole.take(out, lse); }

  __device__ __forceinline__ void store_partial(int first_row, const float (&lse)[2],
                                                const float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (x.row_of(r) >= x.w.q_rows) continue;
      float* to = begin_partial(x, first_row, r, lse[r], x.member == 0);
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (block(n / 2) < C::kBlocks) __stcg(to + column(n, e), out[n][2 * r + e] * factor[r]);
    }
  }

  __device__ __forceinline__ void store_final(float (&lse)[2], float (&factor)[2]) const {
    const AttentionParams& p = x.p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = x.row_of(r), packed = x.w.q_begin + row;
      if (row >= x.w.q_rows) continue;
      factor[r] *= finish_row(p, x.c, x.w, packed, x.kv_head(), lse[r], x.lane % 4 == 0 && x.member == 0);
      T* to = static_cast<T*>(p.out) +
              row_offset(p, x.c, x.w.token_begin, packed, x.kv_head(), p.out_stride_token, p.out_stride_head);
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (block(n / 2) >= C::kBlocks) continue;
          float value = out[n][2 * r + e] * factor[r];
          if constexpr (Variant::kTransformsOutput)
            if (lse[r] != -INFINITY)
              value = Variant::output_transform(p, value, column(n, e),
                                                row_index(p, x.c, x.w, packed, x.kv_head()), lse[r]);
          to[column(n, e)] = T(value);
        }
    }
  }
};

}  // namespace fi::sm80
