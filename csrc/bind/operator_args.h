// SPDX-License-Identifier: Apache-2.0
// From the tensors of append_kv and of the merges to their parameters, on whichever device they lie.
#pragma once
#include "../core/operators.h"
#include "tensor_checks.h"

namespace fi::bind {

inline Dtype dtype_of(const char* name, const TensorView& t, bool allow_fp8) {
  if (same_dtype(t.dtype(), kFloat32)) return Dtype::float32;
  if (same_dtype(t.dtype(), kFloat16)) return Dtype::float16;
  if (same_dtype(t.dtype(), kBFloat16)) return Dtype::bfloat16;
  if (allow_fp8 && same_dtype(t.dtype(), kE4M3)) return Dtype::float8_e4m3fn;
  if (allow_fp8 && same_dtype(t.dtype(), kE5M2)) return Dtype::float8_e5m2;
  TVM_FFI_THROW(TypeError) << name << ": expected float32, float16"
                           << (allow_fp8 ? ", bfloat16, float8_e4m3fn or float8_e5m2" : " or bfloat16")
                           << "; got " << dtype_text(t.dtype()) << ".";
}

inline AppendSide append_side(const char* name, const TensorView& x, const char* cache_name,
                              const TensorView& cache, const char* scale_name, const TensorView& scale,
                              int64_t heads, DLDevice device) {
  AppendSide s{};
  expect_device(name, x, device);
  expect_device(cache_name, cache, device);
  expect_shape(name, x, {-1, heads, -1});
  expect_unit_stride(name, x);
  if (cache.ndim() == 3)
    expect_shape(cache_name, cache, {-1, heads, x.size(2)});
  else
    expect_shape(cache_name, cache, {-1, -1, heads, x.size(2)});
  expect_unit_stride(cache_name, cache);
  expect_vector(scale_name, scale, kFloat32, scale.ndim() == 1 && scale.size(0) == heads ? heads : 1, device);
  s.from = data<void>(x);
  s.to = data<void>(cache);
  s.from_dtype = dtype_of(name, x, false);
  s.to_dtype = dtype_of(cache_name, cache, true);
  s.from_stride_token = x.stride(0);
  s.from_stride_head = x.stride(1);
  s.to_stride_page = cache.stride(0);
  s.to_stride_token = cache.ndim() == 3 ? 0 : cache.stride(1);
  s.to_stride_head = cache.stride(-2);
  s.dim = x.size(2);
  s.scale = data<const float>(scale);
  s.scale_stride = scale.size(0) == 1 ? 0 : 1;
  return s;
}

// Everything but the contents of `slot_mapping`.
inline AppendParams append_params(const TensorView& key, const TensorView& value,
                                  const TensorView& slot_mapping, const TensorView& k_scale,
                                  const TensorView& v_scale, const TensorView& k_cache,
                                  const TensorView& v_cache, DLDevice device) {
  AppendParams p{};
  expect_shape("key", key, {-1, -1, -1});
  const int64_t tokens = key.size(0), heads = key.size(1);
  if (k_cache.ndim() != 3 && k_cache.ndim() != 4)
    TVM_FFI_THROW(ValueError)
        << "k_cache: expected [pages, page_size, KV heads, head_dim] or [tokens, KV heads, head_dim]; got "
        << shape_text(k_cache) << ".";
  if (k_cache.ndim() == 4 && k_cache.size(1) == 0)
    TVM_FFI_THROW(ValueError) << "k_cache: expected a page_size of 1 or more; got " << shape_text(k_cache)
                              << ".";
  p.side[0] = append_side("key", key, "k_cache", k_cache, "k_scale", k_scale, heads, device);
  p.side[1] = append_side("value", value, "v_cache", v_cache, "v_scale", v_scale, heads, device);
  if (v_cache.ndim() != k_cache.ndim() || v_cache.size(0) != k_cache.size(0) ||
      (k_cache.ndim() == 4 && v_cache.size(1) != k_cache.size(1)))
    TVM_FFI_THROW(ValueError) << "v_cache: expected the pages and page size of k_cache, "
                              << shape_text(k_cache) << "; got " << shape_text(v_cache) << ".";
  expect_vector("slot_mapping", slot_mapping, kInt64, -1, device);
  p.num_slots = slot_mapping.size(0);
  if (p.num_slots > tokens || p.num_slots > value.size(0))
    TVM_FFI_THROW(ValueError)
        << "slot_mapping: expected at most one slot for each token of key and value; got " << p.num_slots
        << " for " << tokens << " and " << value.size(0) << " tokens.";
  p.num_heads = heads;
  p.num_pages = k_cache.size(0);
  p.page_size = k_cache.ndim() == 3 ? 1 : k_cache.size(1);
  p.slots = data<const int64_t>(slot_mapping);
  return p;
}

// `slots`: the contents of the slot mapping, in host memory.
inline void expect_slots(const int64_t* slots, const AppendParams& p) {
  const int64_t capacity = p.num_pages * p.page_size;
  for (int64_t i = 0; i < p.num_slots; ++i)
    if (slots[i] < -1 || slots[i] >= capacity)
      TVM_FFI_THROW(ValueError) << "slot_mapping[" << i << "]: expected -1 (skip) or a slot in 0.."
                                << capacity - 1 << ", for " << p.num_pages << " pages of " << p.page_size
                                << " tokens; got " << slots[i] << ".";
}

inline void expect_state(const char* o_name, const TensorView& o, const char* lse_name, const TensorView& lse,
                         DLDevice device) {
  expect_device(o_name, o, device);
  expect_device(lse_name, lse, device);
  expect_dtype(lse_name, lse, kFloat32);
  if (o.ndim() > 0) expect_unit_stride(o_name, o);
}

inline void take_result(MergeParams& p, const TensorView& out, const TensorView& lse, DLDevice device) {
  expect_state("out", out, "lse", lse, device);
  expect_shape("out", out, {p.num_rows, p.num_heads, p.dim});
  expect_shape("lse", lse, {p.num_rows, p.num_heads});
  p.out = data<void>(out);
  p.out_lse = data<float>(lse);
  p.out_stride_row = out.stride(0);
  p.out_stride_head = out.stride(1);
  p.out_lse_stride_row = lse.stride(0);
  p.out_lse_stride_head = lse.stride(1);
}

inline void take_part(MergeParams& p, int i, const TensorView& o, const TensorView& lse) {
  p.o[i] = data<void>(o);
  p.lse[i] = data<const float>(lse);
  p.o_stride_row[i] = o.stride(0);
  p.o_stride_head[i] = o.stride(-2);
  p.lse_stride_row[i] = lse.stride(0);
  p.lse_stride_head[i] = lse.stride(-1);
}

inline MergeParams two_states(const TensorView& o_a, const TensorView& lse_a, const TensorView& o_b,
                              const TensorView& lse_b, const Optional<TensorView>& mask,
                              const TensorView& out, const TensorView& lse, DLDevice device) {
  MergeParams p{};
  expect_shape("o_a", o_a, {-1, -1, -1});
  expect_state("o_a", o_a, "lse_a", lse_a, device);
  p.num_rows = o_a.size(0);
  p.num_heads = o_a.size(1);
  p.dim = o_a.size(2);
  p.dtype = dtype_of("o_a", o_a, false);
  expect_shape("lse_a", lse_a, {p.num_rows, p.num_heads});
  expect_state("o_b", o_b, "lse_b", lse_b, device);
  expect_dtype("o_b", o_b, o_a.dtype());
  expect_shape("o_b", o_b, {p.num_rows, p.num_heads, p.dim});
  expect_shape("lse_b", lse_b, {p.num_rows, p.num_heads});
  if (mask.has_value()) {
    expect_vector("mask", mask.value(), kBool, p.num_rows, device);
    p.mask = data<const uint8_t>(mask.value());
  }
  expect_dtype("out", out, o_a.dtype());
  take_part(p, 0, o_a, lse_a);
  take_part(p, 1, o_b, lse_b);
  p.num_parts = 2;
  take_result(p, out, lse, device);
  return p;
}

inline MergeParams states_of_parts(const TensorView& o, const TensorView& lse_parts, const TensorView& out,
                                   const TensorView& lse, DLDevice device) {
  MergeParams p{};
  expect_shape("o", o, {-1, -1, -1, -1});
  expect_state("o", o, "lse_parts", lse_parts, device);
  p.num_rows = o.size(0);
  p.num_parts = o.size(1);
  p.num_heads = o.size(2);
  p.dim = o.size(3);
  p.dtype = dtype_of("o", o, false);
  expect_shape("lse_parts", lse_parts, {p.num_rows, p.num_parts, p.num_heads});
  expect_dtype("out", out, o.dtype());
  take_part(p, 0, o, lse_parts);
  take_part(p, 1, o, lse_parts);
  p.o_stride_part = o.stride(1);
  p.lse_stride_part = lse_parts.stride(1);
  const int64_t item = o.dtype().bits / 8;
  p.o[1] = static_cast<const char*>(p.o[0]) + p.o_stride_part * item;
  p.lse[1] = p.lse[0] + p.lse_stride_part;
  take_result(p, out, lse, device);
  return p;
}

}  // namespace fi::bind
