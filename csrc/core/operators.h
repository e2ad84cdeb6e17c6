// SPDX-License-Identifier: Apache-2.0
// Operators beside attention, on every device: writing new tokens into a cache, and the union of attention
// states. Element types are chosen at run time.
#pragma once
#include <cstdint>

namespace fi {

enum class Dtype { float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 };

// One of K and V: strides in elements; the last dimension of both sides is contiguous.
struct AppendSide {
  const void* from;  // [tokens, heads, dim] of `from_dtype`
  void* to;          // [pages, page_size, heads, dim] of `to_dtype`
  Dtype from_dtype, to_dtype;
  int64_t from_stride_token, from_stride_head;
  int64_t to_stride_page, to_stride_token, to_stride_head;
  int64_t dim;
  const float* scale;  // the cache holds x / scale; stride 0: one scale, 1: one a head
  int64_t scale_stride;
};

struct AppendParams {
  AppendSide side[2];
  const int64_t* slots;  // page * page_size + offset, or -1: skip
  int64_t num_slots, num_heads, num_pages, page_size;
};

// States [rows, parts, heads, dim] -> [rows, heads, dim], folded left to right. The parts of merge_state are
// two tensors, those of merge_states lie one stride apart.
struct MergeParams {
  const void* o[2];  // first part, second part
  const float* lse[2];
  int64_t o_stride_row[2], o_stride_head[2], lse_stride_row[2], lse_stride_head[2];
  int64_t o_stride_part, lse_stride_part;  // from the second part to the next
  int64_t num_parts;
  const uint8_t* mask;  // [rows] or null: rows with 0 keep the first part
  void* out;
  float* out_lse;
  int64_t out_stride_row, out_stride_head, out_lse_stride_row, out_lse_stride_head;
  int64_t num_rows, num_heads, dim;
  Dtype dtype;
};

}  // namespace fi
