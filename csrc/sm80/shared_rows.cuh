// SPDX-License-Identifier: Apache-2.0
// Tiles of few rows in the batch-invariant mode, where warps must not take tiles of their own: they share
// each one. A warp multiplies eight of its keys; all tell each other maxima and then weights; each multiplies
// some columns of the values. Every element is the same chain of products as in one warp, and every sum has
// the same order, so that the bits are those of tiles of any height.
#pragma once
#include "epilogue.cuh"
#include "grid_state.cuh"

namespace fi::sm80 {

// Where fragments of the queries leave the slices free for maxima, weights and sums.
template <class Traits>
inline constexpr bool kSharesRows =
    Traits::kInvariant && Traits::kQInRegisters && Traits::kColumnWarps == 1 && !kTransformsTiles;

// What one of the warps computes of a row group that all of them share.
template <class Traits>
struct SharedRows {
  using T = typename Traits::T;
  using C = Consumer<Traits>;
  static constexpr int kMembers = Traits::kMaxGroups;
  static_assert(C::kTiles == kMembers, "a warp takes one fragment of a tile's logits");
  static constexpr int kBlocks = ceil_div(C::kBlocks, kMembers);  // this warp's blocks of 16 columns

  // What the warps tell each other of a tile, two warps side by side: of each lane the weights of both rows,
  // as an A fragment has them, and their sums; of each row the greatest logit.
  struct Told {
    uint32_t weights[kMembers / 2][32][2][2];
    float sums[kMembers / 2][32][2][2];
    float maxima[16][kMembers];
  };
  static_assert(sizeof(Told) <= Traits::kQBytes, "it lies where queries were");

  C& x;
  Told& told;
  float out[2 * kBlocks][4];     // of this grid chunk
  GridState<2 * kBlocks> whole;  // of those before it

  __device__ __forceinline__ SharedRows(C& x_, char* shared) : x(x_), told(*reinterpret_cast<Told*>(shared)) {
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

  // All tiles of an item, the first being at `ring` of the pipeline. Between two tiles' softmax stand the
  // values of the one and the keys of the next, whose products are chains that do not wait for each other.
  template <class Chunks>
  __device__ __forceinline__ void attend(Control& control, uint32_t stages, Ring<Traits::kStages> ring,
                                         int tiles, Chunks& chunks) {
    if (tiles == 0) return;
    const float scale = x.logit_scale();
    const auto wait = [&](const Ring<Traits::kStages>& at) {
      ptx::mbarrier_wait(full_barrier(control, at), at.lap >> 1 & 1);
      return stages + at.at * Traits::kStageBytes;
    };
    float s[1][4] = {};
    uint32_t tile = wait(ring);
#pragma unroll
    for (int i = 0; i < kKeyReads; ++i) multiply_keys(tile, i, s[0]);
    int key = x.w.kv_begin + x.member * 8;
#pragma unroll 1
    for (int left = tiles; left > 0; --left) {
      if (chunks.begins(key - x.member * 8)) chunks.end();
      uint32_t a[C::kTiles / 2][4];
      weigh(key, scale, s, a);
      key += Traits::kKvTile;
      const int stage = ring.at;
      if (left > 1) ring.advance();  // else the keys of the last tile once more, or products had a condition
      const uint32_t next = wait(ring);
      multiply(tile, next, a, s[0]);
      tile = next;
      ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[stage]), x.lane);
    }
  }

 private:
  // ldmatrix reads four chunks of 16 bytes of this warp's keys, or 16 values (32 of one byte an element).
  static constexpr int kKeyReads = ceil_div(Traits::kKChunks, 4), kKeySteps = Traits::kFp8 ? 4 : 2;
  static constexpr int kValueSteps = Traits::kFp8 ? 2 : 1, kValueReads = C::kTiles / 2 / kValueSteps;

  // Turns the logits of this warp's keys, of which `key` is the first, into weights; `a` becomes those of all
  // keys. What the output shrinks by, it does.
  __device__ __forceinline__ void weigh(int key, float scale, float (&s)[1][4],
                                        uint32_t (&a)[C::kTiles / 2][4]) {
    using Weight = typename C::Weight;
    float shrink[2] = {1.f, 1.f};
    x.transform(key, scale, s);
    float top[2];
    if constexpr (Variant::kSoftmax) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        if (x.lane % 4 == 0) told.maxima[x.lane / 4 + r * 8][x.member] = top[r];
      }
    }
    sync();  // and all have read the weights before
    if constexpr (Variant::kSoftmax) {
      const float factor = kTransform ? 1.f : scale * kLog2e;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4* row = reinterpret_cast<const float4*>(told.maxima[x.lane / 4 + r * 8]);
        const float4 low = row[0], high = row[kMembers / 4 - 1];
        top[r] = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)),
                       fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
        const float base = x.state.template raise<Weight>(r, factor, top[r], shrink[r]);
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) s[0][e] = ptx::exp2_approx(fmaf(s[0][e], factor, -base));
      }
    }
    const int pair = x.member / 2, half = x.member % 2;
    *reinterpret_cast<uint2*>(told.weights[pair][x.lane][half]) =
        make_uint2(ptx::pack2<Weight>(s[0][0], s[0][1]), ptx::pack2<Weight>(s[0][2], s[0][3]));
    *reinterpret_cast<float2*>(told.sums[pair][x.lane][half]) =
        make_float2(s[0][0] + s[0][1], s[0][2] + s[0][3]);
    sync();
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int t = 0; t < C::kTiles / 2; ++t) {
      const uint4 two = *reinterpret_cast<const uint4*>(told.weights[t][x.lane]);
      a[t][0] = two.x, a[t][1] = two.y, a[t][2] = two.z, a[t][3] = two.w;
      const float4 sums = *reinterpret_cast<const float4*>(told.sums[t][x.lane]);
      total[0] = total[0] + sums.x + sums.z;
      total[1] = total[1] + sums.y + sums.w;
    }
    if constexpr (!Variant::kSoftmax) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) x.state.sum[r] = fmaf(x.state.sum[r], shrink[r], total[r]);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
  }

  // Weights times the values of `tile`, and the queries times this warp's keys of `next`.
  __device__ __forceinline__ void multiply(uint32_t tile, uint32_t next,
                                           const uint32_t (&a)[C::kTiles / 2][4], float (&s)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = 0.f;
#pragma unroll
    for (int i = 0; i < max_of(kKeyReads, kValueReads); ++i) {
      if (i < kKeyReads) multiply_keys(next, i, s);
      if (i < kValueReads) multiply_values(tile + Traits::kKBytes, i, a);
    }
  }

  // Adds the products of read `i` of this warp's keys: ksteps in the order of Consumer::logits().
  __device__ __forceinline__ void multiply_keys(uint32_t k_tile, int i, float (&s)[4]) const {
    const int key = x.member * 8 + (x.lane & 7), chunk = min(i * 4 + (x.lane >> 3), Traits::kKChunks - 1);
    uint32_t b[4];
    ptx::ldmatrix_x4(b, k_tile + swizzled(Traits::kKvTile, key, chunk));
#pragma unroll
    for (int j = 0; j < kKeySteps; ++j) {
      const int step = i * kKeySteps + j;
      if (step >= C::kQSteps) continue;
      if constexpr (Traits::kFp8)
        C::template multiply8<T>(s, x.q[step], b[j]);
      else
        ptx::mma_m16n8k16<T>(s, x.q[step], b[2 * j], b[2 * j + 1]);
    }
  }

  // Adds the products of read `i` of the values of this warp's columns.
  __device__ __forceinline__ void multiply_values(uint32_t v_tile, int i,
                                                  const uint32_t (&a)[C::kTiles / 2][4]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t b[4];
      // Warps without columns multiply the last ones too, which nobody stores: no condition parts the chains.
      const int mine = min(block(n), C::kBlocks - 1);
      C::read_values(b, v_tile + i * kValueSteps * 16 * kRowBytes, mine, x.lane);
#pragma unroll
      for (int j = 0; j < kValueSteps; ++j)
        C::multiply_values(out[2 * n], out[2 * n + 1], a[i * kValueSteps + j], b, j);
    }
  }

 public:
  __device__ __forceinline__ void fold() {
    whole.fold(x.state, out);
    clear();
  }

  // The grid chunks become the result.
  __device__ __forceinline__ void finish(float (&lse)[2]) { whole.finish(x.state, out, lse); }

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
