// SPDX-License-Identifier: Apache-2.0
// What becomes of an item: final rows, or partial states that the last item of a merge unit folds.
#pragma once
#include "consumer.cuh"
#include "ptx/bulk_copy.cuh"

namespace fi::sm80 {

__device__ __forceinline__ int64_t row_offset(const AttentionParams& p, const LaunchConstants& c,
                                              int token_begin, int packed, int kv_head, int64_t stride_token,
                                              int64_t stride_head) {
  const int token = c.group.divide(packed);
  return int64_t(token_begin + token) * stride_token +
         int64_t(kv_head * p.group + packed - token * p.group) * stride_head;
}

// Where packed row `packed` of a request stands. Indices of a composed request's rows are not all known;
// what depends on them plans flat.
__device__ __forceinline__ RowIndex row_index(const AttentionParams& p, const LaunchConstants& c, int request,
                                              int first_pos, int token_begin, int packed, int kv_head) {
  const int token = c.group.divide(packed);
  return {
      request, token, first_pos + token, token_begin + token, kv_head * p.group + packed - token * p.group,
      kv_head};
}

__device__ __forceinline__ RowIndex row_index(const AttentionParams& p, const LaunchConstants& c,
                                              const Work& w, int packed, int kv_head) {
  return row_index(p, c, w.request, w.first_pos, w.token_begin, packed, kv_head);
}

// Columns from `column` on of a row's final output, by way of the variant.
__device__ __forceinline__ float4 output_columns(const AttentionParams& p, float4 o, int column,
                                                 const RowIndex& i, float lse) {
  if constexpr (Variant::kTransformsOutput) {
    if (lse == -INFINITY) return o;
    o.x = Variant::output_transform(p, o.x, column, i, lse);
    o.y = Variant::output_transform(p, o.y, column + 1, i, lse);
    o.z = Variant::output_transform(p, o.z, column + 2, i, lse);
    o.w = Variant::output_transform(p, o.w, column + 3, i, lse);
  }
  return o;
}

// The final factor of a row's normalised output; moves lse, and stores it where it is wanted.
__device__ __forceinline__ float finish_row(const AttentionParams& p, const LaunchConstants& c, const Work& w,
                                            int packed, int kv_head, float& lse, bool stores_lse) {
  float factor = 1.f;
  if (lse != -INFINITY) factor = Variant::finish(p, row_index(p, c, w, packed, kv_head), lse);
  if (w.faults) factor = lse = quiet_nan();
  if (p.lse && stores_lse)
    p.lse[row_offset(p, c, w.token_begin, packed, kv_head, p.lse_stride_token, p.lse_stride_head)] = lse;
  return factor;
}

// Four neighbouring columns of fragment pair n (one block of 16), row half r, as they lie in an fp8 lane; or
// two times two neighbours `h` = 0, 1 otherwise.
template <class Traits>
__device__ __forceinline__ float4 four_columns(const Consumer<Traits>& x, int n, int r) {
  return make_float4(x.out[2 * n][2 * r], x.out[2 * n + 1][2 * r], x.out[2 * n][2 * r + 1],
                     x.out[2 * n + 1][2 * r + 1]);
}

__device__ __forceinline__ float4 times(float4 v, float f) {
  return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

// Where the columns of the lane's row half r lie in the partial states, of which `first_row` is the tile's
// first; one of the warps that share the row stores its lse.
template <class Traits>
__device__ __forceinline__ float* begin_partial(const Consumer<Traits>& x, int first_row, int r, float lse,
                                                bool stores_lse) {
  const AttentionParams& p = x.p;
  const int64_t state = int64_t(first_row + x.row_of(r)) * p.num_kv_heads + x.kv_head();
  if (x.lane % 4 == 0 && stores_lse) __stcg(p.partial_lse + state, lse);
  return p.partial_out + state * Traits::kHeadDimV;
}

// The state (o, lse) of this warp to row `first_row` + row of the partial states.
template <class Traits>
__device__ __forceinline__ void store_partial(const Consumer<Traits>& x, int first_row, const float (&lse)[2],
                                              const float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (x.row_of(r) >= x.w.q_rows) continue;
    float* to =
        begin_partial(x, first_row, r, lse[r], x.column_warp == 0) + x.column_warp * Traits::kWarpColumns;
#pragma unroll
    for (int n = 0; n < Consumer<Traits>::kBlocks; ++n) {
      if constexpr (Traits::kFp8) {
        __stcg(reinterpret_cast<float4*>(to + n * 16 + (x.lane % 4) * 4),
               times(four_columns(x, n, r), factor[r]));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          __stcg(reinterpret_cast<float2*>(to + n * 16 + h * 8 + (x.lane % 4) * 2),
                 make_float2(x.out[2 * n + h][2 * r] * factor[r], x.out[2 * n + h][2 * r + 1] * factor[r]));
      }
    }
  }
}

// Row half r of the output becomes what the variant makes of it, with nothing left to multiply. One condition
// for all: behind one of its own each functor would wait for what it reads of memory.
template <class Traits>
__device__ __forceinline__ void transform_columns(Consumer<Traits>& x, int r, const RowIndex& i, float lse,
                                                  float& factor) {
  if (lse == -INFINITY) return;
#pragma unroll
  for (int n = 0; n < Consumer<Traits>::kColumns; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // The fragments of an fp8 block hold its even and its odd columns.
      const int within = Traits::kFp8 ? (x.lane % 4) * 4 + 2 * e + n % 2 : n % 2 * 8 + (x.lane % 4) * 2 + e;
      const int column = x.column_warp * Traits::kWarpColumns + n / 2 * 16 + within;
      float& o = x.out[n][2 * r + e];
      o = Variant::output_transform(x.p, o * factor, column, i, lse);
    }
  factor = 1.f;
}

// What is left to multiply the lane's two rows by.
template <class Traits>
__device__ __forceinline__ void finish_rows(const Consumer<Traits>& x, float (&lse)[2], float (&factor)[2]) {
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int row = x.row_of(r);
    if (row >= x.w.q_rows) break;
    float sum = r == 0 ? lse[0] : lse[1];
    const float last =
        finish_row(x.p, x.c, x.w, x.w.q_begin + row, x.kv_head(), sum, x.lane % 4 == 0 && x.column_warp == 0);
    if (r == 0)
      lse[0] = sum, factor[0] *= last;
    else
      lse[1] = sum, factor[1] *= last;
  }
}

// Block n of 16 columns, as stmatrix stores it.
template <class Traits>
__device__ __forceinline__ void pack_block(const Consumer<Traits>& x, int n, const float (&factor)[2],
                                           uint32_t (&block)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&o)[4] = x.out[2 * n + i / 2];
    block[i] = ptx::pack2<typename Traits::T>(o[i % 2 * 2] * factor[i % 2], o[i % 2 * 2 + 1] * factor[i % 2]);
  }
}

// Where a row of the output leaves by one bulk copy, its row in the slice is followed by 16 bytes, so that
// eight rows lie in different banks.
template <class Traits>
inline constexpr int kBulkPitch = Traits::kWarpColumns * 2 + 16;
template <class Traits>
inline constexpr bool kBulkRows = Traits::kWgmma && !Traits::kFp8 && Traits::kColumnWarps == 1 &&
                                  !kWideHeads<Traits> && 16 * kBulkPitch<Traits> <= Traits::kSliceBytes;

// Sixteen normalised rows of a warp, each copied by the lane of its number. The slice may be written again
// once that lane has waited.
template <class Traits>
__device__ __forceinline__ void store_rows_in_bulk(const Consumer<Traits>& x, const float (&factor)[2]) {
  using T = typename Traits::T;
  const AttentionParams& p = x.p;
  const Work& w = x.w;
  const uint32_t slice = ptx::shared_address(x.slice);
  const uint32_t to = slice + x.lane % 16 * kBulkPitch<Traits> + (x.lane >> 4) * 16;
#pragma unroll
  for (int n = 0; n < Consumer<Traits>::kBlocks; ++n) {
    uint32_t block[4];
    pack_block(x, n, factor, block);
    ptx::stmatrix_x4(to + n * 32, block);
  }
  ptx::fence_async_shared();
  __syncwarp();
  const int row = x.group * 16 + x.lane;
  if (x.lane < 16 && row < w.q_rows)
    ptx::bulk_store(static_cast<T*>(p.out) + row_offset(p, x.c, w.token_begin, w.q_begin + row, x.kv_head(),
                                                        p.out_stride_token, p.out_stride_head),
                    slice + x.lane * kBulkPitch<Traits>, Traits::kWarpColumns * 2);
  ptx::bulk_commit();
}

// Final rows of one warp go through its slice to leave as whole 16-byte chunks.
template <class Traits>
__device__ __forceinline__ void store_final(Consumer<Traits>& x, float (&lse)[2], float (&factor)[2]) {
  using T = typename Traits::T;
  const AttentionParams& p = x.p;
  const Work& w = x.w;
  x.sync_columns();  // the queries have been read
  char* slice = x.own_slice();
  finish_rows(x, lse, factor);
  if constexpr (Variant::kTransformsOutput) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (const int row = x.row_of(r); row < w.q_rows)
        transform_columns(x, r, row_index(p, x.c, w, w.q_begin + row, x.kv_head()), lse[r], factor[r]);
  }
  if constexpr (kBulkRows<Traits>) return store_rows_in_bulk(x, factor);
  if constexpr (kMovesRegisters && !Traits::kFp8) {
    const uint32_t to = x.matrix_base();
#pragma unroll
    for (int n = 0; n < Consumer<Traits>::kBlocks; ++n) {
      uint32_t block[4];
      pack_block(x, n, factor, block);
      ptx::stmatrix_x4(chunk_pair(to, 16, n), block);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int slice_row = x.lane / 4 + r * 8;
#pragma unroll
      for (int n = 0; n < Consumer<Traits>::kBlocks; ++n) {
        if constexpr (Traits::kFp8) {
          const float4 v = times(four_columns(x, n, r), factor[r]);
          const int at = (x.lane % 4) * 4;
          *reinterpret_cast<uint2*>(slice + swizzled(16, slice_row, n * 2 + at / 8) + at % 8 * 2) =
              make_uint2(ptx::pack2<T>(v.x, v.y), ptx::pack2<T>(v.z, v.w));
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            *reinterpret_cast<uint32_t*>(slice + swizzled(16, slice_row, n * 2 + h) + (x.lane % 4) * 4) =
                ptx::pack2<T>(x.out[2 * n + h][2 * r] * factor[r], x.out[2 * n + h][2 * r + 1] * factor[r]);
        }
      }
    }
  }
  __syncwarp();
  // Where a row lies is found once, by the lane of its number. Not unrolled: straight code runs as fast as
  // instructions arrive, some eight in 90 cycles.
  const int lane_row = x.group * 16 + x.lane % 16;
  const T* lane_to = static_cast<const T*>(p.out) + x.column_warp * Traits::kWarpColumns;
  if (lane_row < w.q_rows)
    lane_to += row_offset(p, x.c, w.token_begin, w.q_begin + lane_row, x.kv_head(), p.out_stride_token,
                          p.out_stride_head);
  const auto place = reinterpret_cast<uint64_t>(lane_to);
  const int rows = w.q_rows - x.group * 16;
  constexpr int kChunks = Traits::kWarpColumns / 8;
  static_assert(kChunks % 2 == 0, "all lanes stay together");
#pragma unroll 1
  for (int i = x.lane; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const uint32_t low = __shfl_sync(~0u, uint32_t(place), row);
    const uint32_t high = __shfl_sync(~0u, uint32_t(place >> 32), row);
    if (row >= rows) continue;
    T* to = reinterpret_cast<T*>(uint64_t(high) << 32 | low);
    *reinterpret_cast<uint4*>(to + chunk * 8) =
        *reinterpret_cast<const uint4*>(slice + swizzled(16, row, chunk));
  }
}

inline constexpr int kMergeBatch = 8;

// A running sum of weighted parts, normalised at the end.
struct Accumulator {
  float top = -INFINITY, sum = 0.f;
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);

  __device__ __forceinline__ void rescale(float next) {
    const float before = top;
    top = next;  // without softmax too: -inf says that a share has no part
    if constexpr (!Variant::kSoftmax) return;
    const float a = next == -INFINITY ? 1.f : ptx::exp2_approx((before - next) * kLog2e);
    sum *= a;
    acc = times(acc, a);
  }

  __device__ __forceinline__ void add(float lse, float4 o) { add(lse, 1.f, o); }

  // `top` is at least lse.
  __device__ __forceinline__ void add(float lse, float weight, float4 o) {
    if (lse == -INFINITY) return;
    float b = lse == lse ? ptx::exp2_approx((lse - top) * kLog2e) : lse;
    if constexpr (!Variant::kSoftmax) b = lse == lse ? 1.f : lse;
    sum = fmaf(weight, b, sum);
    acc = make_float4(fmaf(o.x, b, acc.x), fmaf(o.y, b, acc.y), fmaf(o.z, b, acc.z), fmaf(o.w, b, acc.w));
  }
};

// How consumers share the rows that they fold: a slot of lanes takes a row, a lane four columns at a time.
template <class Traits>
struct MergeSlots {
  static constexpr int kVectors = Traits::kHeadDimV / 4;
  static constexpr int kLanes = kVectors <= 16 ? 16 : 32;
  static constexpr int kCount = kConsumers / kLanes;
};

// Four columns of the partial state at `state_row`.
template <class Traits>
__device__ __forceinline__ void load_part(const AttentionParams& p, int state_row, int kv_head, int vector,
                                          float& lse, float4& o) {
  const int64_t state = int64_t(state_row) * p.num_kv_heads + kv_head;
  lse = __ldcg(p.partial_lse + state);
  o = __ldcg(reinterpret_cast<const float4*>(p.partial_out + state * Traits::kHeadDimV) + vector);
}

// Final row of a merged unit: four columns a thread.
template <class Traits>
__device__ __forceinline__ void store_merged(const AttentionParams& p, const LaunchConstants& c,
                                             int token_begin, int packed, int kv_head, int vector, float4 o,
                                             float lse, int request = 0, int first_pos = 0) {
  using T = typename Traits::T;
  const auto index = [&] { return row_index(p, c, request, first_pos, token_begin, packed, kv_head); };
  float factor = lse != -INFINITY ? Variant::finish(p, index(), lse) : 1.f;
  if (lse != lse) factor = lse;  // a part that met a fault, however it was joined
  o = times(o, factor);
  if constexpr (Variant::kTransformsOutput) o = output_columns(p, o, vector * 4, index(), lse);
  T* to = static_cast<T*>(p.out) + vector * 4 +
          row_offset(p, c, token_begin, packed, kv_head, p.out_stride_token, p.out_stride_head);
  *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack2<T>(o.x, o.y), ptx::pack2<T>(o.z, o.w));
  if (p.lse && vector == 0)
    p.lse[row_offset(p, c, token_begin, packed, kv_head, p.lse_stride_token, p.lse_stride_head)] = lse;
}

template <class Traits>
__device__ __forceinline__ void store_sum(const AttentionParams& p, const LaunchConstants& c,
                                          const Accumulator& sum, int token_begin, int packed, int kv_head,
                                          int vector, int request = 0, int first_pos = 0) {
  float inverse = sum.sum > 0.f ? 1.f / sum.sum : sum.sum;
  float lse = sum.sum > 0.f ? sum.top + logf(sum.sum) : sum.sum == 0.f ? -INFINITY : sum.sum;
  if (!Variant::kSoftmax && sum.sum == sum.sum) inverse = 1.f, lse = 0.f;
  store_merged<Traits>(p, c, token_begin, packed, kv_head, vector, times(sum.acc, inverse), lse, request,
                       first_pos);
}

// Parts that are joined relative to their common maximum. Rows of composed requests have few parts each.
inline constexpr int kLevelBatch = 4;

__device__ __forceinline__ void add_batch(Accumulator& sum, const float* lse, const float4* o) {
  float top = sum.top;
#pragma unroll
  for (int i = 0; i < kLevelBatch; ++i) top = fmaxf(top, lse[i]);
  sum.rescale(top);
#pragma unroll
  for (int i = 0; i < kLevelBatch; ++i) sum.add(lse[i], o[i]);
}

// Folds four columns of a row whose part in `own` is not in memory, as fold_rows() would.
template <class Traits>
__device__ __forceinline__ void fold_levels(const AttentionParams& p, const LaunchConstants& c, const Work& w,
                                            int kv_head, int row, int vector, float own_lse, float4 own) {
  constexpr int kParts = 2 * kLevelBatch;
  const auto* parts = reinterpret_cast<const int32_t*>(p.plan + p.layout.parts);
  Accumulator sum;
#pragma unroll 1
  for (int begin = w.parts_begin; begin < w.parts_end; begin += kParts) {
    float lse[kParts];
    float4 o[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      lse[i] = -INFINITY;
      o[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (begin + i >= w.parts_end) continue;
      const int part = parts[begin + i];
      if (part == w.partial) {
        lse[i] = own_lse;
        o[i] = own;
      } else {
        load_part<Traits>(p, part + row, kv_head, vector, lse[i], o[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kParts; i += kLevelBatch) add_batch(sum, lse + i, o + i);
  }
  store_sum<Traits>(p, c, sum, w.token_begin, w.q_begin + row, kv_head, vector, w.request, w.first_pos);
}

// Joins the states of the warps that shared the KV tiles of a row group, in their order, eight rows at a
// time, and stores the result. Returns whether it is final although the item is one of several of its unit.
template <class Traits>
__device__ __forceinline__ bool combine(const Consumer<Traits>& x, Control& control, char* shared) {
  using T = typename Traits::T;
  const AttentionParams& p = x.p;
  const Work& w = x.w;
  constexpr int kVectors = Traits::kWarpColumns / 4, kRowFloats = Traits::kWarpColumns;
  // Tiles of different heights follow each other without a common barrier, so each has names of its own.
  const int places = Traits::kMaxGroups >> x.members_log2, threads = x.members * 32;
  const int barrier = 1 + Traits::kColumnWarps * (places + x.place()) + x.column_warp;
  const int first_warp = x.place() * x.members * Traits::kColumnWarps + x.column_warp;
  const auto sync = [&] {
    if (kBundles<Traits> && threads == 32)
      __syncwarp();
    else
      ptx::named_barrier(barrier, threads);
  };
  const int active =
      min(x.members, w.tiles << x.sharers_log2());  // the first tiles belong to the first of them
  const auto states_of = [&](int warp) {
    return shared + (warp / Traits::kColumnWarps) * Traits::kSliceBytes +
           x.column_warp * (Traits::kSliceBytes / Traits::kColumnWarps);
  };
  const auto source = [&](int m) { return first_warp + m * Traits::kColumnWarps; };
  const auto chunk_at = [](int row, int chunk) { return row * kRowFloats + ((chunk ^ (row & 3)) << 2); };
  // Where all other items of a unit have arrived, its last state need not go through memory.
  constexpr bool kFinishes = kComposes<Traits> && Traits::kColumnWarps == 1;
  const bool folds = kComposes<Traits> && w.levels && w.tokens < 0;
  const bool may_finish = kFinishes && folds && (places == 1 || x.in_bundle());
  int32_t* counter = p.counters + kArrivals + w.unit * p.num_kv_heads + x.kv_head();
  const bool leads_place = x.member == 0 && x.lane == 0;
  int arrived = 0;
  if (may_finish && leads_place) arrived = ptx::load_acquire(counter);
  bool finishes = false;
  const auto put_rows = [&](int r) {
    const int row = x.lane / 4 + (kStateRows > 8 ? r * 8 : 0);
    const float sum = quad_sum(x.state.sum[r]);
    if (x.lane % 4 == 0) control.stats[x.warp][row] = make_float2(x.state.max[r], sum);
    // Blocks of 16 columns follow each other at one distance, in whose chunks chunk_at() changes the lower
    // bits.
    float* slice = reinterpret_cast<float*>(x.own_slice());
    if constexpr (Traits::kFp8) {
      float* to = slice + chunk_at(row, x.lane % 4);
#pragma unroll
      for (int n = 0; n < Consumer<Traits>::kBlocks; ++n)
        *reinterpret_cast<float4*>(to + n * 16) = four_columns(x, n, r);
    } else {
      float* left = slice + chunk_at(row, x.lane % 4 / 2) + x.lane % 2 * 2;
      float* right = slice + chunk_at(row, 2 + x.lane % 4 / 2) + x.lane % 2 * 2;
#pragma unroll
      for (int n = 0; n < Consumer<Traits>::kBlocks; ++n) {
        *reinterpret_cast<float2*>(left + n * 16) = make_float2(x.out[2 * n][2 * r], x.out[2 * n][2 * r + 1]);
        *reinterpret_cast<float2*>(right + n * 16) =
            make_float2(x.out[2 * n + 1][2 * r], x.out[2 * n + 1][2 * r + 1]);
      }
    }
  };
  // Not unrolled: see store_final().
#pragma unroll 1
  for (int first = 0; first < 16; first += kStateRows) {
    const int rows = min(w.q_rows - x.group * 16 - first, kStateRows);
    if (rows <= 0) break;
    // Nobody still reads queries in this slice, or the rows before these.
    if (first == 0)
      x.sync_columns();
    else
      sync();
    if (first == 0) put_rows(0);
    if (first + rows > 8 && first + kStateRows > 8) put_rows(1);
    if (may_finish && first == 0 && leads_place) control.place_arrived[x.warp] = arrived == w.num_items - 1;
    sync();
    FI_MARK(control, "states met");
    if (may_finish && first == 0)
      finishes = *static_cast<volatile int32_t*>(&control.place_arrived[x.warp - x.member]);
    for (int i = x.member * 32 + x.lane; i < rows * kVectors; i += threads) {
      const int out_row = i / kVectors, vector = i % kVectors;
      // Loops of few instructions: unrolled over all warps, fetching the code took longer than reading the
      // states.
      float top = -INFINITY;
#pragma unroll 2
      for (int m = 0; m < active; ++m) top = fmaxf(top, control.stats[source(m)][out_row].x);
      const float base = top == -INFINITY ? 0.f : top;
      float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
      float total = 0.f;
#pragma unroll 2
      for (int m = 0; m < active; ++m) {
        const float2 stat = control.stats[source(m)][out_row];
        const float4 o =
            *reinterpret_cast<const float4*>(states_of(source(m)) + chunk_at(out_row, vector) * 4);
        const float weight = Variant::kSoftmax ? ptx::exp2_approx(stat.x - base) : 1.f;
        total = fmaf(stat.y, weight, total);
        acc = make_float4(fmaf(o.x, weight, acc.x), fmaf(o.y, weight, acc.y), fmaf(o.z, weight, acc.z),
                          fmaf(o.w, weight, acc.w));
      }
      float lse, inverse;
      finish_state(top, total, lse, inverse);
      const int tile_row = x.group * 16 + first + out_row;
      const bool leads = vector == 0 && x.column_warp == 0;
      const int column = x.column_warp * Traits::kWarpColumns + vector * 4;
      if (kFinishes && finishes) {
        fold_levels<Traits>(p, x.c, w, x.kv_head(), tile_row, vector, w.faults ? quiet_nan() : lse,
                            times(acc, inverse));
      } else if (w.partial < 0) {
        const int packed = w.q_begin + tile_row;
        acc = times(acc, inverse * finish_row(p, x.c, w, packed, x.kv_head(), lse, leads));
        if constexpr (Variant::kTransformsOutput)
          acc = output_columns(p, acc, column, row_index(p, x.c, w, packed, x.kv_head()), lse);
        T* to = static_cast<T*>(p.out) + column +
                row_offset(p, x.c, w.token_begin, packed, x.kv_head(), p.out_stride_token, p.out_stride_head);
        *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack2<T>(acc.x, acc.y), ptx::pack2<T>(acc.z, acc.w));
      } else {
        const int64_t state = int64_t(w.partial + tile_row) * p.num_kv_heads + x.kv_head();
        if (leads) __stcg(p.partial_lse + state, w.faults ? quiet_nan() : lse);
        __stcg(reinterpret_cast<float4*>(p.partial_out + state * Traits::kHeadDimV + column),
               times(acc, inverse));
      }
    }
  }
  if (finishes && leads_place) *counter = 0;
  sync();  // the slices are free again
  return finishes;
}

}  // namespace fi::sm80
