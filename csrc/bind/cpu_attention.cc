// SPDX-License-Identifier: Apache-2.0
// Checks that run once a launch: full optimisation gains nothing here and nearly doubles the build time.
#pragma GCC optimize("O1")
#include <utility>

#include "../cpu/attention.h"
#include "attention_args.h"
#include "variant_call.h"

namespace fi::bind {
namespace {

void expect_rows_inside(const AttentionParams& p, int64_t available) {
  for (int32_t r = 0; r < p.num_requests; ++r)
    if (p.level.row_end[r] > available)
      TVM_FFI_THROW(ValueError) << "row_end[" << r << "]: expected at most " << available
                                << (p.level.indices ? ", the entries of indices" : ", the tokens of k_cache")
                                << "; got " << p.level.row_end[r] << ".";
}

void expect_mask_inside(const AttentionParams& p, int64_t bytes) {
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int64_t rows = (int64_t(p.qo_indptr[r + 1]) - p.qo_indptr[r]) * p.mask_heads;
    const int64_t bits = rows * p.mask_kv_len[r];
    if (p.mask_begin[r] < 0 || p.mask_kv_len[r] < 0 || (bits + 7) / 8 > bytes - p.mask_begin[r])
      TVM_FFI_THROW(ValueError) << "mask: expected request " << r << " within the " << bytes
                                << " bytes of the mask; got " << bits << " bits from byte " << p.mask_begin[r]
                                << ". Call plan() again when query lengths grow.";
  }
}

}  // namespace

void run(TensorView q, TensorView k_cache, TensorView v_cache, TensorView qo_indptr,
         Optional<TensorView> indices, TensorView row_begin, TensorView row_end, TensorView kv_lens,
         int64_t index_step, int64_t index_divisor, int64_t page_size, int64_t num_pages, TensorView plan,
         TensorView caps, TensorView workspace, double scale, TensorView k_scale, TensorView v_scale,
         bool causal, int64_t window_left, double soft_cap, Optional<TensorView> alibi,
         Optional<TensorView> sinks, Optional<TensorView> mask, Optional<TensorView> mask_begin,
         Optional<TensorView> mask_kv_len, int64_t mask_heads, bool debug, int64_t num_threads,
         TensorView out, Optional<TensorView> lse FI_VARIANT_PARAMETERS) {
  expect_host("q", q);
  if (num_threads < 1) TVM_FFI_THROW(ValueError) << "num_threads: expected >= 1; got " << num_threads << ".";
  AttentionParams p = read_arguments(q, k_cache, v_cache, qo_indptr, indices, row_begin, row_end, kv_lens,
                                     index_step, index_divisor, page_size, num_pages, plan, caps, workspace,
                                     scale, k_scale, v_scale, causal, window_left, soft_cap, alibi, sinks,
                                     mask, mask_begin, mask_kv_len, mask_heads, num_threads, out, lse);
  FI_READ_VARIANT(p, q.device());
  expect_rows_inside(p, p.level.num_indices);
  if (p.custom_mask) expect_mask_inside(p, p.mask_bytes);
  const std::string error = cpu::find_error(p, q.size(0), debug);
  if (!error.empty()) TVM_FFI_THROW(ValueError) << error;
  cpu::run_attention(p, int(num_threads));
  if (std::exchange(p.counters[kFaults], 0) & kFaultPages)
    TVM_FFI_THROW(ValueError) << "page table: expected page ids inside the " << p.level.num_pages
                              << " pages of k_cache; got others, so that the output is not valid. "
                                 "FI_BACKEND_DEBUG=1 says which.";
}

}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, fi::bind::run);
