// SPDX-License-Identifier: Apache-2.0
#include "../core/variant.h"
#include "../sm80/launch.h"
#include "attention_args.h"
#include "cuda_call.h"
#include "variant_call.h"

namespace fi::bind {
namespace {

// The kernel moves 16 bytes at a time.
void expect_aligned(const char* name, const void* data, std::initializer_list<int64_t> strides,
                    int64_t item) {
  bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int64_t stride : strides) aligned = aligned && stride * item % 16 == 0;
  if (!aligned)
    TVM_FFI_THROW(ValueError) << name
                              << ": expected a start and strides that are multiples of 16 bytes; got others. "
                                 "Copy it with .contiguous(), or align the allocation.";
}

}  // namespace

void run(TensorView q, TensorView k_cache, TensorView v_cache, TensorView qo_indptr,
         Optional<TensorView> indices, TensorView row_begin, TensorView row_end, TensorView kv_lens,
         int64_t index_step, int64_t index_divisor, int64_t page_size, int64_t num_pages, TensorView plan,
         TensorView caps, TensorView workspace, double scale, TensorView k_scale, TensorView v_scale,
         bool causal, int64_t window_left, double soft_cap, Optional<TensorView> alibi,
         Optional<TensorView> sinks, Optional<TensorView> mask, Optional<TensorView> mask_begin,
         Optional<TensorView> mask_kv_len, int64_t mask_heads, int64_t num_ctas, TensorView out,
         Optional<TensorView> lse FI_VARIANT_PARAMETERS) {
  const CudaCall call("q", q);
  AttentionParams p = read_arguments(q, k_cache, v_cache, qo_indptr, indices, row_begin, row_end, kv_lens,
                                     index_step, index_divisor, page_size, num_pages, plan, caps, workspace,
                                     scale, k_scale, v_scale, causal, window_left, soft_cap, alibi, sinks,
                                     mask, mask_begin, mask_kv_len, mask_heads, num_ctas, out, lse);
  if (p.head_dim != FI_HEAD_DIM || p.head_dim_v != FI_HEAD_DIM_V)
    TVM_FFI_THROW(ValueError) << "q, v_cache: expected head dimensions " << FI_HEAD_DIM << " and "
                              << FI_HEAD_DIM_V << ", this module's; got " << p.head_dim << " and "
                              << p.head_dim_v << ".";
  if ((!FI_LOGITS_TRANSFORM && (StandardVariant::has_transform(p) || !(p.scale > 0.f))) ||
      (!FI_LOGITS_MASK && StandardVariant::has_mask(p)))
    TVM_FFI_THROW(ValueError)
        << "soft_cap, alibi_slopes, mask, scale <= 0: expected none, as this module is compiled "
           "without; got one. Use the module of a spec that has it.";
  if (FI_LOGITS_MASK && !mask.has_value())
    TVM_FFI_THROW(ValueError)
        << "mask: expected a packed mask, as this module is compiled with one; got None.";
  if (p.level.num_pages >= int64_t(1) << 31)
    TVM_FFI_THROW(ValueError) << "k_cache: expected fewer than 2^31 pages; got " << p.level.num_pages << ".";
  constexpr int64_t kQItem = kQuery.bits / 8, kKvItem = kCache.bits / 8;
  expect_aligned("q", p.q, {p.q_stride_token, p.q_stride_head}, kQItem);
  expect_aligned("out", p.out, {p.out_stride_token, p.out_stride_head}, kQItem);
  expect_aligned("k_cache", p.k, {p.k_stride_page, p.k_stride_token, p.k_stride_head}, kKvItem);
  expect_aligned("v_cache", p.v, {p.v_stride_page, p.v_stride_token, p.v_stride_head}, kKvItem);
  expect_aligned("workspace", p.partial_out, {}, 1);
  FI_READ_VARIANT(p, q.device());
  expect_success("attention kernel", sm80::launch(p, int(num_ctas), call.stream()));
}

// Loads the kernel on the device of any tensor.
void prepare(TensorView there) {
  const CudaCall call("device", there);
  expect_success("attention kernel", sm80::prepare());
}

}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, fi::bind::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, fi::bind::prepare);
