// SPDX-License-Identifier: Apache-2.0
// States at fixed key positions (batch-invariant mode): how grid chunks become one state, whoever computes
// them.
#pragma once
#include "softmax.cuh"

namespace fi::sm80 {

// How a chunk that has ended joins those before it, in one row of a lane. It is normalised first, as the
// merge of stored states finds it.
struct ChunkJoin {
  float before, chunk, inverse, a, b;

  // `lse`, of the chunks before, becomes that of all.
  __device__ __forceinline__ ChunkJoin(const RowState& state, int r, float& lse) : before(lse) {
    state.finish(r, chunk, inverse);
    join(before, chunk, a, b, lse);
  }

  __device__ __forceinline__ float operator()(float whole, float x) const {
    const float part = x * inverse;
    return before == -INFINITY ? (chunk == -INFINITY ? 0.f : part) : joined(whole, a, part, b);
  }
};

// The state of the grid chunks so far, of kColumns fragments of the output, in registers.
template <int kColumns>
struct GridState {
  float out[kColumns][4];
  float lse[2] = {-INFINITY, -INFINITY};

  // Joins a finished chunk.
  __device__ __forceinline__ void fold(const RowState& state, const float (&chunk)[kColumns][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const ChunkJoin all(state, r, lse[r]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) out[n][e] = all(out[n][e], chunk[n][e]);
    }
  }

  // Joins the last chunk, whose place the result takes.
  __device__ __forceinline__ void finish(const RowState& state, float (&last)[kColumns][4],
                                         float (&whole_lse)[2]) {
    fold(state, last);
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) last[n][e] = out[n][e];
    whole_lse[0] = lse[0], whole_lse[1] = lse[1];
  }
};

// The same in the slice of a warp whose queries are registers: in the loop every one of them is taken.
template <int kColumns>
struct GridSlice {
  float4* const slots;  // of this lane, one in 32
  float lse[2] = {-INFINITY, -INFINITY};

  __device__ __forceinline__ GridSlice(char* slice, int lane)
      : slots(reinterpret_cast<float4*>(slice) + lane) {}

  __device__ __forceinline__ void fold(const RowState& state, const float (&chunk)[kColumns][4]) {
    const ChunkJoin upper(state, 0, lse[0]), lower(state, 1, lse[1]);
    __syncwarp();  // the queries have been read
#pragma unroll
    for (int n = 0; n < kColumns; ++n) slots[n * 32] = joined_with(n, upper, lower, chunk[n]);
  }

  __device__ __forceinline__ void finish(const RowState& state, float (&last)[kColumns][4],
                                         float (&whole_lse)[2]) {
    const ChunkJoin upper(state, 0, lse[0]), lower(state, 1, lse[1]);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float4 x = joined_with(n, upper, lower, last[n]);
      last[n][0] = x.x, last[n][1] = x.y, last[n][2] = x.z, last[n][3] = x.w;
    }
    whole_lse[0] = lse[0], whole_lse[1] = lse[1];
  }

 private:
  // Before the first border the slot holds anything, which is not looked at.
  __device__ __forceinline__ float4 joined_with(int n, const ChunkJoin& upper, const ChunkJoin& lower,
                                                const float (&chunk)[4]) const {
    const float4 whole = slots[n * 32];
    return make_float4(upper(whole.x, chunk[0]), upper(whole.y, chunk[1]), lower(whole.z, chunk[2]),
                       lower(whole.w, chunk[3]));
  }
};

// What becomes of the chunk that ends at a grid border: the first item of a unit joins its chunks into one
// state, every other one stores each of them at `partial`.
template <class Rows>
__device__ __forceinline__ void end_chunk(Rows& rows, int& partial) {
  const auto& w = rows.x.w;
  if (w.folds) {
    rows.fold();
    return;
  }
  float lse[2], factor[2];
  for (int r = 0; r < 2; ++r) rows.x.state.finish(r, lse[r], factor[r]);
  rows.store_partial(partial, lse, factor);
  partial += w.planned_rows;
  rows.clear();
}

// The result of an item, whose last chunk has not ended.
template <class Rows>
__device__ __forceinline__ void end_item(Rows& rows, int partial) {
  const auto& w = rows.x.w;
  float lse[2], factor[2] = {1.f, 1.f};
  if (w.folds) {
    rows.finish(lse);
  } else {
    for (int r = 0; r < 2; ++r) rows.x.state.finish(r, lse[r], factor[r]);
  }
  if (w.partial < 0) {
    rows.store_final(lse, factor);
    return;
  }
  if (w.faults) lse[0] = lse[1] = quiet_nan();
  rows.store_partial(partial, lse, factor);
  // Chunks that the exact lengths left empty.
  const float none[2] = {-INFINITY, -INFINITY};
  for (partial += w.planned_rows; partial < w.partial_end; partial += w.planned_rows)
    rows.store_partial(partial, none, factor);
}

}  // namespace fi::sm80
