// SPDX-License-Identifier: Apache-2.0
// What a kernel is given. Plain data with device pointers; all strides in elements, 64-bit.
#pragma once
#include <cstdint>

#include "plan.h"
#if defined(FI_VARIANT)
#include "variant_args.h"
#endif

namespace fi {

// What a kernel found wrong with data that only it can see; or-ed into the second of the plan's counters. The
// rows concerned are NaN, and nothing outside the given memory was touched.
enum KernelFault : int32_t {
  kFaultPages = 1,    // a page index outside the KV cache
  kFaultLengths = 2,  // a KV length beyond the pages of its row, or query rows outside the output
};

// Block-sparse rows over pages that stay where they are: page p of request r is
//   indices ? indices[row_begin[r] + p * index_step] / index_divisor : row_begin[r] + p
// A block table has step 1 and divisor 1; a table of token slots has step and divisor page_size;
// contiguous (ragged) KV has no indices and page size 1.
struct LevelParams {
  const int32_t* indices;    // null: affine addressing
  const int64_t* row_begin;  // [num_requests]
  const int64_t* row_end;    // [num_requests], one past the last index that may be read
  const int32_t* kv_lens;    // [num_requests], exact KV tokens
  int32_t index_step;
  int32_t index_divisor;
  int32_t page_size;
  int64_t num_pages;    // pages in the KV cache; indices outside are never followed
  int64_t num_indices;  // entries of `indices`, or tokens of contiguous KV; rows end within
  int32_t
      last_page_size;  // tokens of the last page: fewer than page_size where contiguous KV is cut into pages
};

struct AttentionParams {
  const void* q;  // [tokens, num_qo_heads, head_dim]
  void* out;      // [tokens, num_qo_heads, head_dim_v]
  float* lse;     // [tokens, num_qo_heads], natural log; may be null
  int64_t q_stride_token, q_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t lse_stride_token, lse_stride_head;

  const void* k;  // page, token and head strides of K and of V are independent
  const void* v;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  int64_t v_stride_page, v_stride_token, v_stride_head;

  const int32_t* qo_indptr;  // [num_requests + 1], exact
  LevelParams level;
  int32_t num_requests;
  int32_t num_tokens;  // rows of q and out that exist
  int32_t num_qo_heads, num_kv_heads, group;
  int32_t head_dim, head_dim_v;

  float scale;           // softmax scale
  const float* k_scale;  // dequantisation of fp8 K and V: [1] (stride 0) or [num_kv_heads] (stride 1)
  const float* v_scale;
  int32_t k_scale_stride, v_scale_stride;

  int32_t causal;
  int32_t window_left;        // -1: off
  float soft_cap;             // 0: off
  const float* alibi_slopes;  // [num_qo_heads] or null
  const float* sinks;         // [num_qo_heads] or null
  const uint8_t*
      custom_mask;  // packed bits, little end first, or null: bit (query token, head, key) of request
  const int64_t*
      mask_begin;  // r is bit mask_begin[r] * 8 + (token * mask_heads + head) * mask_kv_len[r] + key
  const int32_t* mask_kv_len;  // row length of the mask; keys past it are masked
  int64_t mask_bytes;
  int32_t mask_heads;  // 1: one mask for all heads; else num_kv_heads or num_qo_heads

  const uint8_t* plan;  // sections at the offsets of `layout`
  PlanLayout layout;
  float* partial_out;  // [partial_rows, num_kv_heads, head_dim_v]
  float* partial_lse;  // [partial_rows, num_kv_heads]
  int32_t* counters;   // the plan's section of that name
#if defined(FI_VARIANT)
  VariantArgs variant;  // what the user passed to the functors
#endif
};

}  // namespace fi
