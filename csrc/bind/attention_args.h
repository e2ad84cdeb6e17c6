// SPDX-License-Identifier: Apache-2.0
// The arguments of one attention call, checked and turned into what a kernel is given. FI_Q_DTYPE and
// FI_KV_DTYPE name the dtypes that the module was compiled for.
#pragma once
#include "../core/scratch.h"
#include "tensor_checks.h"

namespace fi::bind {
#define FI_TEXT_OF(x) #x
#define FI_TEXT(x) FI_TEXT_OF(x)

constexpr DLDataType dtype_named(std::string_view name) {
  if (name == "float32") return kFloat32;
  if (name == "float16") return kFloat16;
  if (name == "bfloat16") return kBFloat16;
  return name == "float8_e4m3fn" ? kE4M3 : kE5M2;
}
constexpr DLDataType kQuery = dtype_named(FI_TEXT(FI_Q_DTYPE));
constexpr DLDataType kCache = dtype_named(FI_TEXT(FI_KV_DTYPE));

// fp8 caches may come as raw bytes.
inline void expect_cache(const char* name, const TensorView& t, DLDevice device) {
  expect_device(name, t, device);
  if (!(kCache.bits == 8 && same_dtype(t.dtype(), kUInt8))) expect_dtype(name, t, kCache);
}

struct CacheStrides {
  int64_t page, token, head;
};

inline CacheStrides cache_strides(const char* name, const TensorView& t, int64_t page_size, int64_t heads,
                                  int64_t dim, DLDevice device) {
  expect_cache(name, t, device);
  const bool ragged = t.ndim() == 3;
  if (ragged)
    expect_shape(name, t, {-1, heads, dim});
  else
    expect_shape(name, t, {-1, page_size, heads, dim});
  expect_unit_stride(name, t);
  return ragged ? CacheStrides{page_size * t.stride(0), t.stride(0), t.stride(1)}
                : CacheStrides{t.stride(0), t.stride(1), t.stride(2)};
}

inline const float* expect_scale(const char* name, const TensorView& t, int64_t heads, DLDevice device,
                                 int32_t& stride) {
  expect_vector(name, t, kFloat32, t.ndim() == 1 && t.size(0) == heads ? heads : 1, device);
  stride = t.size(0) == 1 ? 0 : 1;
  return data<const float>(t);
}

inline const float* optional_heads(const char* name, const Optional<TensorView>& t, int64_t heads,
                                   DLDevice device) {
  if (!t.has_value()) return nullptr;
  expect_vector(name, t.value(), kFloat32, heads, device);
  return data<const float>(t.value());
}

inline PlanCapacity read_capacity(const TensorView& caps) {
  expect_vector("caps", caps, kInt64, kCapacityFields);
  const auto* v = data<const int64_t>(caps);
  return {int32_t(v[0]), int32_t(v[1]), int32_t(v[2]), int32_t(v[3]), int32_t(v[4]), int32_t(v[5]),
          int32_t(v[6]), int32_t(v[7]), int32_t(v[8]), int32_t(v[9]), int32_t(v[10])};
}

inline void expect_bytes(const char* name, const TensorView& t, int64_t bytes, DLDevice device) {
  expect_device(name, t, device);
  expect_dtype(name, t, kUInt8);
  if (t.ndim() != 1 || t.size(0) < bytes)
    TVM_FFI_THROW(ValueError) << name << ": expected at least " << bytes << " bytes; got " << shape_text(t)
                              << ".";
}

// `workers`: threads or CTAs. All tensors live where q lives, except caps, which is always on the host.
inline AttentionParams read_arguments(
    TensorView q, TensorView k_cache, TensorView v_cache, TensorView qo_indptr, Optional<TensorView> indices,
    TensorView row_begin, TensorView row_end, TensorView kv_lens, int64_t index_step, int64_t index_divisor,
    int64_t page_size, int64_t num_pages, TensorView plan, TensorView caps, TensorView workspace,
    double scale, TensorView k_scale, TensorView v_scale, bool causal, int64_t window_left, double soft_cap,
    Optional<TensorView> alibi, Optional<TensorView> sinks, Optional<TensorView> mask,
    Optional<TensorView> mask_begin, Optional<TensorView> mask_kv_len, int64_t mask_heads, int64_t workers,
    TensorView out, Optional<TensorView> lse) {
  AttentionParams p{};
  const DLDevice device = q.device();
  expect_dtype("q", q, kQuery);
  expect_shape("q", q, {-1, -1, -1});
  expect_unit_stride("q", q);
  const int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2);
  if (dim < 1) TVM_FFI_THROW(ValueError) << "q: expected head_dim >= 1; got shape " << shape_text(q) << ".";
  if (k_cache.ndim() != 3 && k_cache.ndim() != 4)
    TVM_FFI_THROW(ValueError)
        << "k_cache: expected [pages, page_size, KV heads, head_dim] or [tokens, KV heads, head_dim]; got "
        << shape_text(k_cache) << ".";
  const int64_t kv_heads = k_cache.size(-2), dim_v = v_cache.size(-1);
  const CacheStrides ks = cache_strides("k_cache", k_cache, page_size, kv_heads, dim, device);
  const CacheStrides vs = cache_strides("v_cache", v_cache, page_size, kv_heads, dim_v, device);
  if (kv_heads == 0 || heads % kv_heads != 0)
    TVM_FFI_THROW(ValueError) << "q: expected a multiple of the " << kv_heads << " KV heads of k_cache; got "
                              << heads << " heads.";
  if (v_cache.size(0) != k_cache.size(0))
    TVM_FFI_THROW(ValueError) << "v_cache: expected " << k_cache.size(0) << " pages, as k_cache; got "
                              << v_cache.size(0) << ".";
  if (index_step < 1 || index_divisor < 1 || page_size < 1 || workers < 1)
    TVM_FFI_THROW(ValueError) << "index_step, index_divisor, page_size, workers: expected >= 1; got "
                              << index_step << ", " << index_divisor << ", " << page_size << ", " << workers
                              << ".";
  const bool contiguous = k_cache.ndim() == 3;
  const int64_t pages = contiguous ? (k_cache.size(0) + page_size - 1) / page_size : k_cache.size(0);
  if (num_pages > pages)
    TVM_FFI_THROW(ValueError) << "num_pages: expected at most the " << pages << " pages of k_cache; got "
                              << num_pages << ".";

  const int64_t requests = kv_lens.ndim() == 1 ? kv_lens.size(0) : -1;
  expect_vector("kv_lens", kv_lens, kInt32, requests, device);
  expect_vector("qo_indptr", qo_indptr, kInt32, requests + 1, device);
  expect_vector("row_begin", row_begin, kInt64, requests, device);
  expect_vector("row_end", row_end, kInt64, requests, device);

  p.q = data<void>(q);
  p.q_stride_token = q.stride(0);
  p.q_stride_head = q.stride(1);
  p.k = data<void>(k_cache);
  p.v = data<void>(v_cache);
  p.k_stride_page = ks.page;
  p.k_stride_token = ks.token;
  p.k_stride_head = ks.head;
  p.v_stride_page = vs.page;
  p.v_stride_token = vs.token;
  p.v_stride_head = vs.head;
  p.qo_indptr = data<const int32_t>(qo_indptr);
  p.level.row_begin = data<const int64_t>(row_begin);
  p.level.row_end = data<const int64_t>(row_end);
  p.level.kv_lens = data<const int32_t>(kv_lens);
  p.level.index_step = int32_t(index_step);
  p.level.index_divisor = int32_t(index_divisor);
  p.level.page_size = int32_t(page_size);
  p.level.num_pages = num_pages;
  const bool cut = contiguous && num_pages == pages && k_cache.size(0) % page_size != 0;
  p.level.last_page_size = int32_t(cut ? k_cache.size(0) % page_size : page_size);
  p.num_requests = int32_t(requests);
  p.num_tokens = int32_t(tokens);
  p.num_qo_heads = int32_t(heads);
  p.num_kv_heads = int32_t(kv_heads);
  p.group = int32_t(heads / kv_heads);
  p.head_dim = int32_t(dim);
  p.head_dim_v = int32_t(dim_v);
  p.scale = float(scale);
  p.k_scale = expect_scale("k_scale", k_scale, kv_heads, device, p.k_scale_stride);
  p.v_scale = expect_scale("v_scale", v_scale, kv_heads, device, p.v_scale_stride);
  p.causal = causal;
  p.window_left = int32_t(window_left);
  p.soft_cap = float(soft_cap);
  p.alibi_slopes = optional_heads("alibi_slopes", alibi, heads, device);
  p.sinks = optional_heads("sinks", sinks, heads, device);

  int64_t available = k_cache.size(0);
  if (indices.has_value()) {
    expect_device("indices", indices.value(), device);
    expect_dtype("indices", indices.value(), kInt32);
    p.level.indices = data<const int32_t>(indices.value());
    available = extent(indices.value());
  }
  p.level.num_indices = available;

  if (mask.has_value()) {
    if (!mask_begin.has_value() || !mask_kv_len.has_value())
      TVM_FFI_THROW(ValueError) << "mask: expected mask_begin and mask_kv_len with it; got None.";
    expect_vector("mask", mask.value(), kUInt8, -1, device);
    expect_vector("mask_begin", mask_begin.value(), kInt64, requests, device);
    expect_vector("mask_kv_len", mask_kv_len.value(), kInt32, requests, device);
    p.custom_mask = data<const uint8_t>(mask.value());
    p.mask_begin = data<const int64_t>(mask_begin.value());
    p.mask_kv_len = data<const int32_t>(mask_kv_len.value());
    p.mask_bytes = mask.value().size(0);
    if (mask_heads != 1 && mask_heads != kv_heads && mask_heads != heads)
      TVM_FFI_THROW(ValueError) << "mask_heads: expected 1, the " << kv_heads << " KV heads or the " << heads
                                << " query heads; got " << mask_heads << ".";
    p.mask_heads = int32_t(mask_heads);
  }

  expect_device("out", out, device);
  expect_dtype("out", out, kQuery);
  expect_shape("out", out, {tokens, heads, dim_v});
  expect_unit_stride("out", out);
  p.out = data<void>(out);
  p.out_stride_token = out.stride(0);
  p.out_stride_head = out.stride(1);
  if (lse.has_value()) {
    expect_device("lse", lse.value(), device);
    expect_dtype("lse", lse.value(), kFloat32);
    expect_shape("lse", lse.value(), {tokens, heads});
    p.lse = data<float>(lse.value());
    p.lse_stride_token = lse.value().stride(0);
    p.lse_stride_head = lse.value().stride(1);
  }

  const PlanCapacity capacity = read_capacity(caps);
  p.layout = plan_layout(capacity);
  expect_bytes("plan", plan, p.layout.total, device);
  const ScratchLayout scratch = scratch_layout(capacity, p.num_kv_heads, p.head_dim_v);
  expect_bytes("workspace", workspace, scratch.total, device);
  p.plan = data<const uint8_t>(plan);
  p.counters = reinterpret_cast<int32_t*>(data<char>(plan) + p.layout.counters);
  p.partial_out = reinterpret_cast<float*>(data<char>(workspace) + scratch.partial_out);
  p.partial_lse = reinterpret_cast<float*>(data<char>(workspace) + scratch.partial_lse);

  return p;
}

}  // namespace fi::bind
