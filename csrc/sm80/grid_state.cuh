// SPDX-License-Identifier: Apache-2.0
// States at fixed key positions (batch-invariant mode): how grid chunks become one state, whoever computes
// them.
#pragma once
#include "softmax.cuh"

namespace fi::sm80 {

// The state of the grid chunks so far, of kColumns fragments of the output.
template <int kColumns>
struct GridState {
  float out[kColumns][4];
  float lse[2] = {-INFINITY, -INFINITY};

  // Joins a finished chunk. It is normalised first, as the merge of stored states finds it.
  __device__ __forceinline__ void fold(const RowState& state, const float (&chunk)[kColumns][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float chunk_lse, inverse, next, a, b;
      state.finish(r, chunk_lse, inverse);
      join(lse[r], chunk_lse, a, b, next);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          const float part = chunk[n][e] * inverse;
          out[n][e] =
              lse[r] == -INFINITY ? (chunk_lse == -INFINITY ? 0.f : part) : joined(out[n][e], a, part, b);
        }
      lse[r] = next;
    }
  }

  // Makes it the result.
  __device__ __forceinline__ void take(float (&to)[kColumns][4], float (&to_lse)[2]) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[n][e] = out[n][e];
    to_lse[0] = lse[0], to_lse[1] = lse[1];
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
    rows.fold();
    rows.take_whole(lse);
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
