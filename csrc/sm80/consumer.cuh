// SPDX-License-Identifier: Apache-2.0
// What one consumer warp computes: 16 packed query rows against KV tiles, with a softmax state of its own.
// Tiles of fewer rows than the warps could hold spread their KV tiles over warps; nobody waits for another
// warp's arithmetic until the states are combined at the end.
#pragma once
#include "fragments.cuh"
#include "ptx/wgmma.cuh"
#include "tiles_in_place.cuh"
#include "transformed_tiles.cuh"

namespace fi::sm80 {

// A tile's address of 16-byte chunk pairs, as ldmatrix wants it from this lane: `base` holds the row and the
// swizzled lower bit of the chunk, and the upper bits of the chunk number are XORed or added.
__device__ __forceinline__ uint32_t chunk_pair(uint32_t base, int rows, int pair) {
  return (base ^ uint32_t((pair & 3) << 5)) + uint32_t((pair >> 2) * rows * kRowBytes);
}

// Tiles of at most eight rows leave half of what a warp multiplies empty. Their second halves take what the
// rounding of the weights leaves over, so that values meet weights of twice the bits at no further product.
template <class Traits>
inline constexpr bool kFewRows = !Traits::kInvariant;
template <class Traits>
__device__ __forceinline__ bool has_few_rows(const Work& w) {
  return kFewRows<Traits> && w.tile_log2 <= 4 && w.q_rows <= 8;
}

__device__ __forceinline__ int row_groups_log2(const Work& w) { return max(w.tile_log2 - 4, 0); }
__device__ __forceinline__ int row_groups(const Work& w) { return 1 << row_groups_log2(w); }

template <class Traits>
struct Consumer : Fragments<Traits> {
  using T = typename Traits::T;
  using TKV = typename Traits::TKV;
  using Weight = WeightOf<Traits>;
  using Fragments<Traits>::read_values, Fragments<Traits>::multiply_values;
  static constexpr int kMaxGroupsLog2 = Traits::kMaxGroups == 8 ? 3 : 2;
  static_assert(1 << kMaxGroupsLog2 == Traits::kMaxGroups);
  static constexpr int kQSteps = Traits::kHeadDim / 16;  // ksteps of Q K^T
  static constexpr int kKvTile = Traits::kKvTile;
  static constexpr int kTiles = kKvTile / 8;                                // fragments of a tile's logits
  static constexpr int kStepTiles = kHalves<Traits> ? kTiles / 2 : kTiles;  // of those of one step
  static constexpr int kBlocks = Traits::kWarpColumns / 16;                 // 16-column blocks of the output
  static constexpr int kColumns = kBlocks * 2;                              // fragments of the output

  // On the way to fragments.
  static constexpr bool kTransformsKeys = Variant::kTransformsKey && !kTransformsInPlace<Traits>;
  static constexpr bool kTransformsValues = Variant::kTransformsValue && !kTransformsInPlace<Traits>;

  const AttentionParams& p;
  const LaunchConstants& c;
  const Work& w;
  const int warp, lane;
  char* slice;
  int group, member, members;  // row group; which of the warps that share its KV tiles; how many those are
  int members_log2;
  int pair, column_warp;       // which of the warps that share rows and columns
  int inner_begin, inner_end;  // keys that all rows see
  uint32_t q[Traits::kQInRegisters ? kQSteps : 1][4];
  float out[kColumns][4];
  RowState state;

  __device__ __forceinline__ bool in_bundle() const { return kBundles<Traits> && w.heads_log2 > 0; }
  // The row group, or which head of a bundle.
  __device__ __forceinline__ int place() const { return kBundles<Traits> ? warp >> members_log2 : group; }
  __device__ __forceinline__ int kv_head() const { return in_bundle() ? w.kv_head + place() : w.kv_head; }

  // What products of queries and keys are multiplied by. A negative scale would make the least logit the
  // maximum: better no number than a wrong one.
  __device__ __forceinline__ float logit_scale() const {
    float scale = p.scale;
    if (!Variant::kTransformsKey || turns_in_place<Traits>(p))
      scale *= p.k_scale[kv_head() * p.k_scale_stride];
    return kTransform || scale > 0.f ? scale : quiet_nan();
  }

  // Whether this warp transforms some keys of a tile and multiplies the same (attend_alone()).
  __device__ __forceinline__ bool transforms_alone() const {
    return kTransformsAlone<Traits> && members == kConsumerWarps;
  }

  // How many warps have the tiles of this one in common.
  __device__ __forceinline__ int sharers_log2() const {
    if (transforms_alone()) return kKvTile == 64 ? 2 : 1;
    return kHalves<Traits> && members > 1;
  }

  // Barrier between the warps that share a slice: the columns of the same rows, or a warpgroup's queries,
  // which lie where narrower tiles have the slices of any warp.
  __device__ __forceinline__ void sync_columns() const {
    if constexpr (kWideHeads<Traits>)
      ptx::named_barrier(kWideBarrier, kConsumers);
    else if constexpr (Traits::kColumnWarps == 1)
      __syncwarp();
    else
      ptx::named_barrier(10 + pair, 32 * Traits::kColumnWarps);
  }

  // Where this warp's own columns leave through shared memory.
  __device__ __forceinline__ char* own_slice() const {
    if constexpr (kWideHeads<Traits>) return slice + warp % 4 * tile_bytes(16, Traits::kWarpColumns * 2);
    return slice + column_warp * (Traits::kSliceBytes / Traits::kColumnWarps);
  }

  // Offset of 16 bytes of this warp's queries in its slice.
  __device__ __forceinline__ uint32_t query_at(int row, int chunk) const {
    if constexpr (kWideHeads<Traits>) return swizzled(kWideRows, warp % 4 * 16 + row, chunk);
    return swizzled(16, row, chunk);
  }

  // Row of the tile that element r (0, 1) of a fragment holds in this lane.
  __device__ __forceinline__ int row_of(int r) const { return group * 16 + lane / 4 + r * 8; }

  __device__ __forceinline__ Consumer(const AttentionParams& p_, const LaunchConstants& c_, const Work& w_,
                                      int tid, char* shared)
      : p(p_), c(c_), w(w_), warp(tid / 32), lane(tid % 32) {
    pair = warp / Traits::kColumnWarps;
    slice = shared + (kWideHeads<Traits> ? warp / 4 * tile_bytes(kWideRows, Traits::kHeadDim * 2)
                                         : pair * Traits::kSliceBytes);
    members_log2 = kMaxGroupsLog2 - row_groups_log2(w) - (kBundles<Traits> ? w.heads_log2 : 0);
    members = 1 << members_log2;
    column_warp = warp % Traits::kColumnWarps;
    group = in_bundle() ? 0 : pair >> members_log2;
    member = pair & (members - 1);
    inner_begin = max(w.lo, Variant::visible_keys(p, w.last, w.kv_end).begin);
    inner_end = min(w.kv_end, Variant::visible_keys(p, w.first, w.kv_end).end);
    if (!(kRingQueries<Traits> && w.query_tiles)) load_queries();
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.f;
    state = RowState{};
  }

  // Sixteen rows from global memory to the slice, those that do not exist as zeros; warps that share them
  // share the work.
  __device__ __forceinline__ void load_queries() {
    constexpr int kMine = Traits::kHeadDim / 8 / 2 / Traits::kColumnWarps;
    // Few rows, as a decoding request has: less code to fetch, and a quarter of the addresses.
    constexpr int kFew = Traits::kColumnWarps == 1 && kMine % 4 == 0 ? kMine / 4 : kMine;
    if constexpr (Variant::kTransformsQuery)
      transform_queries();
    else if (kFew < kMine && w.q_rows <= group * 16 + 4)
      copy_queries<kFew, kMine>();
    else
      copy_queries<kMine, kMine>();
    if constexpr (Traits::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kQSteps; ++step) read_q(step, q[step]);
    }
  }

  // Chunks of 16 bytes by every lane: kCopies, and zeros up to kAll.
  template <int kCopies, int kAll>
  __device__ __forceinline__ void copy_queries() {
    constexpr int kChunks = Traits::kHeadDim / 8;  // of 16 bytes, a row
    const T* from = static_cast<const T*>(p.q) + int64_t(w.token_begin) * p.q_stride_token;
    const auto place = [&](int i, int& row, int& chunk) {
      const int at = (column_warp * kAll + i) * 32 + lane;
      row = at / kChunks;
      chunk = at % kChunks;
    };
    uint4 raw[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      int row, chunk;
      place(i, row, chunk);
      raw[i] = make_uint4(0, 0, 0, 0);
      if (group * 16 + row < w.q_rows) {
        const int packed = w.q_begin + group * 16 + row;
        int token = c.group.divide(packed);
        const int head = kv_head() * p.group + packed - token * p.group;
        if (kComposes<Traits> && w.tokens >= 0) {
          token = node_token(p, w, token);
          if (token < 0) continue;
        }
        const T* q_row = from + int64_t(token) * p.q_stride_token + int64_t(head) * p.q_stride_head;
        raw[i] = __ldg(reinterpret_cast<const uint4*>(q_row + chunk * 8));
      }
    }
    sync_columns();  // the results of the item before have left the slice
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      int row, chunk;
      place(i, row, chunk);
      put_query(row, chunk, i < kCopies ? raw[i] : make_uint4(0, 0, 0, 0));
    }
    if constexpr (kWideHeads<Traits>) ptx::fence_async_shared();
    sync_columns();
  }

  __device__ __forceinline__ void put_query(int row, int chunk, const uint4& x) {
    if constexpr (Traits::kFp8) {
      // A fragment of fp8 keys holds four neighbours a lane, so the columns of Q are permuted alike.
      const int block = chunk / 2 * 2, half = chunk % 2 * 8;
      *reinterpret_cast<uint2*>(slice + swizzled(16, row, block) + half) = make_uint2(x.x, x.z);
      *reinterpret_cast<uint2*>(slice + swizzled(16, row, block + 1) + half) = make_uint2(x.y, x.w);
    } else {
      *reinterpret_cast<uint4*>(slice + query_at(row, chunk)) = x;
    }
  }

  // copy_queries() by way of a functor, whose code may be long and runs once an item: one copy of it.
  __device__ __forceinline__ void transform_queries() {
    constexpr int kChunks = Traits::kHeadDim / 8;
    const T* from = static_cast<const T*>(p.q) + int64_t(w.token_begin) * p.q_stride_token;
    sync_columns();  // the results of the item before have left the slice
#pragma unroll 1
    for (int at = column_warp * 32 + lane; at < 16 * kChunks; at += 32 * Traits::kColumnWarps) {
      const int row = at / kChunks, chunk = at % kChunks;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (group * 16 + row < w.q_rows) {
        const int packed = w.q_begin + group * 16 + row;
        int token = c.group.divide(packed);
        const int head = kv_head() * p.group + packed - token * p.group;
        if (kComposes<Traits> && w.tokens >= 0) token = node_token(p, w, token);
        if (token >= 0)
          x = transformed_query(
              from + int64_t(token) * p.q_stride_token + int64_t(head) * p.q_stride_head, chunk * 8,
              {w.request, token, w.first_pos + token, w.token_begin + token, head, kv_head()});
      }
      put_query(row, chunk, x);
    }
    if constexpr (kWideHeads<Traits>) ptx::fence_async_shared();
    sync_columns();
  }

  __device__ __forceinline__ uint4 transformed_query(const T* row, int column, const RowIndex& index) const {
    const auto load = [&](int d) { return float(row[d]); };
    const float whole = Variant::query_row(p, load, index);
    uint32_t pairs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      pairs[e] = ptx::pack2<T>(Variant::query_transform(p, load, column + 2 * e, index, whole),
                               Variant::query_transform(p, load, column + 2 * e + 1, index, whole));
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  // What chunk_pair() wants for sixteen rows of this warp's slice.
  __device__ __forceinline__ uint32_t matrix_base() const {
    return ptx::shared_address(own_slice()) + (lane % 16) * kRowBytes + (((lane >> 4) ^ (lane & 7)) << 4);
  }

  __device__ __forceinline__ void read_q(int step, uint32_t (&a)[4]) const {
    const uint32_t base =
        ptx::shared_address(slice) + (lane % 16) * kRowBytes + (((lane >> 4) ^ (lane & 7)) << 4);
    ptx::ldmatrix_x4(a, chunk_pair(base, 16, step));
  }

  // The queries from a stage of the ring, which is free afterwards.
  __device__ __forceinline__ void take_queries(Control& control, uint32_t stages,
                                               const Ring<Traits::kStages>& stage) {
    ptx::mbarrier_wait(full_barrier(control, stage), stage.lap >> 1 & 1);
    const int first_row = (in_bundle() ? place() : group) * 16;
    const uint32_t base = stages + stage.at * Traits::kStageBytes + (first_row + lane % 16) * kRowBytes +
                          (((lane >> 4) ^ (lane & 7)) << 4);
    const int rows = query_tile_rows(w);
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) ptx::ldmatrix_x4(q[step], chunk_pair(base, rows, step));
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[stage.at]), lane);
  }

  // What the variant makes of the whole key that this lane multiplies of each eight.
  template <int kN>
  __device__ __forceinline__ void read_key_rows(uint32_t k_tile, int key_begin, float (&whole)[kN]) const {
#pragma unroll
    for (int t = 0; t < kN; ++t) {
      const int key = t * 8 + lane / 4;
      whole[t] = Variant::template key_row<float>(
          p, element_loader<Traits>(k_tile, key, p.k_scale[kv_head() * p.k_scale_stride]),
          KeyIndexOf<int>{w.request, key_begin + key, kv_head()});
    }
  }

  // Fragment of K for kstep `step` and keys 8 t .. 8 t + 7, by way of the variant's transform.
  __device__ __forceinline__ void multiply_transformed(float (&d)[4], const uint32_t (&a)[4], uint32_t k_tile,
                                                       int key_begin, int t, int step, float whole) const {
    const int key = t * 8 + lane / 4, lo = step * 16 + (lane % 4) * (Traits::kFp8 ? 4 : 2);
    const auto pair_at = [&](int at) {
      return transformed_keys<Traits>(p, k_tile, w.request, key_begin + key, kv_head(), key, at, whole);
    };
    ptx::mma_m16n8k16<T>(d, a, pair_at(lo), pair_at(lo + (Traits::kFp8 ? 2 : 8)));
  }

  // Whether 8 kN keys are what a warp takes at a time that transforms them alone.
  template <int kN>
  static constexpr bool kFewKeys = kN == kKeysAlone / 8 && kTransformsAlone<Traits>;

  // Logits of 8 kN keys.
  template <int kN>
  __device__ __forceinline__ void logits(uint32_t k_tile, int key_begin, float (&s)[kN][4]) {
#pragma unroll
    for (int t = 0; t < kN; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = 0.f;
    // Few keys are few chains of products, each of which waits for itself: odd ksteps have chains of their
    // own.
    constexpr bool kSplit = kFewKeys<kN>;
    [[maybe_unused]] float odd[kN][4] = {};
    [[maybe_unused]] float whole[kN];
    if constexpr (kTransformsKeys) read_key_rows(k_tile, key_begin, whole);
    // One ldmatrix reads 16 keys x 2 chunks: one kstep of 16-bit elements, two of 8-bit ones.
    constexpr int kStepsRead = Traits::kFp8 ? 2 : 1;
    const int key = (lane & 7) + ((lane >> 4) << 3);
    const uint32_t base = k_tile + key * kRowBytes + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < ceil_div(Traits::kKChunks, 2); ++i) {
      uint32_t b[kN / 2][4];
#pragma unroll
      for (int n = 0; n < kN / 2 && !kTransformsKeys; ++n)
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
        for (int n = 0; n < kN / 2; ++n) {
          if constexpr (kTransformsKeys) {
            multiply_transformed(s[2 * n], a, k_tile, key_begin, 2 * n, step, whole[2 * n]);
            multiply_transformed(s[2 * n + 1], a, k_tile, key_begin, 2 * n + 1, step, whole[2 * n + 1]);
          } else if constexpr (Traits::kFp8) {
            // A register holds four of a key's elements: of one kstep under the permuted order.
            Fragments<Traits>::template multiply8<T>(s[2 * n], a, b[n][j]);
            Fragments<Traits>::template multiply8<T>(s[2 * n + 1], a, b[n][2 + j]);
          } else {
            auto& sums = kSplit && step % 2 ? odd : s;
            ptx::mma_m16n8k16<T>(sums[2 * n], a, b[n][0], b[n][1]);
            ptx::mma_m16n8k16<T>(sums[2 * n + 1], a, b[n][2], b[n][3]);
          }
        }
      }
    }
    if constexpr (kSplit)
#pragma unroll
      for (int t = 0; t < kN; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][e] += odd[t][e];
  }

  // Whether all rows see all keys from key_begin on.
  __device__ __forceinline__ bool sees_all(int key_begin, int keys) const {
    return key_begin >= inner_begin && key_begin + keys <= inner_end && !kMask;
  }

  // Masks and transforms the logits of keys key_begin .. key_begin + 8 kN - 1. kMasks: false where all rows
  // see all of them.
  template <int kRows = 2, bool kMasks = true, int kN>
  __device__ __forceinline__ void transform(int key_begin, float scale, float (&s)[kN][4]) const {
    if (!kTransform && (!kMasks || sees_all(key_begin, kN * 8))) return;
    const int first_key = key_begin + (lane % 4) * 2;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int packed = w.q_begin + row_of(r);
      LogitIndex i;
      i.request = w.request;
      i.q_token = c.group.divide(packed);
      i.q_pos = w.first_pos + i.q_token;
      i.kv_head = kv_head();
      i.qo_head = i.kv_head * p.group + packed - i.q_token * p.group;
      if (row_of(r) >= w.q_rows) i.q_token = 0;  // nobody looks at the row, but its mask must exist
      const KeyRange visible = Variant::visible_keys(p, i.q_pos, w.kv_end);
#pragma unroll
      for (int t = 0; t < kN; ++t)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          i.kv_pos = first_key + t * 8 + (e & 1);
          float x = s[t][e];
          if constexpr (kTransform) {
            x = Variant::template logits_transform<DeviceMath>(p, x * scale, i);
            if constexpr (Variant::kSoftmax) x *= kLog2e;
          }
          bool seen = !kMasks || (i.kv_pos >= visible.begin && i.kv_pos < visible.end);
          if constexpr (kMasks && kMask) seen = seen && Variant::logits_mask(p, i);
          s[t][e] = seen ? x : Variant::kSoftmax ? -INFINITY : 0.f;
        }
    }
  }

  // Turns logits into weights and shrinks the output so far by as much as the maximum grew.
  template <int kRows, int kN>
  __device__ __forceinline__ void weigh(float scale, float (&s)[kN][4]) {
    // Beside few keys the shuffles of a maximum would be a large part of all. Halfs leave no room above it.
    if constexpr (kFewKeys<kN> && kWeightBits<Weight> == 0.f)
      if (state.template update_below<kRows>(scale, s)) return;
    float shrink[2];
    state.template update<Weight, kRows>(scale, s, shrink);
    if constexpr (kRows == 1) shrink[1] = shrink[0];
    // Later tiles rarely hold a new maximum; a factor of 1 changes nothing.
    if (!__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
  }

  // The products of the weights and of what they were rounded by.
  __device__ __forceinline__ void join_halves() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        // Infinite values are infinite already, and what was rounded off may be zero.
        if (fabsf(out[n][e]) < INFINITY) out[n][e] += out[n][2 + e];
  }

  template <int kRows, int kN>
  __device__ __forceinline__ void accumulate(uint32_t v_tile, int key_begin, float scale, float (&s)[kN][4]) {
    if constexpr (Variant::kSoftmax) weigh<kRows>(scale, s);
    constexpr int kSteps = Traits::kFp8 ? 2 : 1;  // of 16 keys, that one ldmatrix reads
#pragma unroll
    for (int t = 0; t < kN / 2; t += kSteps) {
      uint32_t a[kSteps][4];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) Fragments<Traits>::template weights_fragment<kRows>(s, t + j, a[j]);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int block = column_warp * kBlocks + n;
        if constexpr (kTransformsValues) {
#pragma unroll
          for (int j = 0; j < kSteps; ++j) {
            const uint4 b = transformed_values<Traits>(p, w, v_tile, kv_head(), key_begin, t + j, block);
            ptx::mma_m16n8k16<T>(out[2 * n], a[j], b.x, b.y);
            ptx::mma_m16n8k16<T>(out[2 * n + 1], a[j], b.z, b.w);
          }
          continue;
        }
        uint32_t b[4];
        read_values(b, v_tile + t * 16 * kRowBytes, block, lane);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) multiply_values(out[2 * n], out[2 * n + 1], a[j], b, j);
      }
    }
  }

  // 8 kN keys of a tile at `stage` of the ring, from row `row` on.
  template <int kRows, int kN = kStepTiles>
  __device__ __forceinline__ void step(uint32_t stage, int row, int key_begin, float scale) {
    float s[kN][4];
    stage += row * kRowBytes;
    logits(stage, key_begin + row, s);
    transform<kRows>(key_begin + row, scale, s);
    accumulate<kRows>(stage + Traits::kKBytes, key_begin + row, kTransform ? 1.f : scale * kLog2e, s);
  }
};

}  // namespace fi::sm80
