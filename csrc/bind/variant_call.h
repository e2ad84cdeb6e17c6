// SPDX-License-Identifier: Apache-2.0
// The arguments of a user's variant: checked against what it declares and put where functors find them.
// Without a variant there are none.
#pragma once
#include "attention_args.h"

#if defined(FI_VARIANT)
#include <array>

namespace fi::bind {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Tensor;

struct ScalarParam {
  const char* name;
  bool whole;  // int32 or bool
};

// Sizes below zero stand for those of the call.
enum ParamSize : int64_t {
  kAnySize = -1,
  kQoHeads = -2,
  kKvHeads = -3,
  kHeadDim = -4,
  kHeadDimV = -5,
  kRequests = -6,
  kTokens = -7
};

struct TensorParam {
  const char* name;
  DLDataType dtype;
  bool optional;
  int ndim;
  int64_t shape[kMaxVariantDims];
};

}  // namespace fi::bind

#include "user_variant_params.h"  // generated

namespace fi::bind {

inline int64_t size_of(const AttentionParams& p, int64_t size) {
  switch (size) {
    case kQoHeads:
      return p.num_qo_heads;
    case kKvHeads:
      return p.num_kv_heads;
    case kHeadDim:
      return p.head_dim;
    case kHeadDimV:
      return p.head_dim_v;
    case kRequests:
      return p.num_requests;
    case kTokens:
      return p.num_tokens;
    default:
      return size;
  }
}

inline void expect_param(const TensorParam& want, const TensorView& t, const AttentionParams& p,
                         DLDevice device) {
  expect_device(want.name, t, device);
  expect_dtype(want.name, t, want.dtype);
  bool same = t.ndim() == want.ndim;
  std::ostringstream text;
  for (int i = 0; i < want.ndim; ++i) {
    const int64_t size = size_of(p, want.shape[i]);
    same = same && (size < 0 || t.size(i) == size);
    text << (i ? ", " : "");
    size < 0 ? text << "any" : text << size;
  }
  if (!same)
    TVM_FFI_THROW(ValueError) << want.name << ": expected shape [" << text.str() << "]; got " << shape_text(t)
                              << ".";
  int64_t stride = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (t.size(i) > 1 && t.stride(i) != stride)
      TVM_FFI_THROW(ValueError) << want.name << ": expected a contiguous tensor; call .contiguous() on it.";
    stride *= t.size(i);
  }
}

// `values`: the tensors that the variant declares, None where an optional one is left out, then its numbers.
inline void read_variant(AttentionParams& p, DLDevice device, const Array<Any>& values) {
  if (values.size() != kTensorParams.size() + kScalarParams.size())
    TVM_FFI_THROW(ValueError) << "variant: expected " << kTensorParams.size() + kScalarParams.size()
                              << " arguments; got " << values.size() << ".";
  for (size_t i = 0; i < kTensorParams.size(); ++i) {
    const TensorParam& want = kTensorParams[i];
    const auto given = values[int64_t(i)].cast<Optional<Tensor>>();
    if (!given.has_value()) {
      if (!want.optional)
        TVM_FFI_THROW(ValueError) << want.name << ": expected a tensor, as the variant declares; got None.";
      continue;
    }
    const Tensor held = given.value();
    const TensorView t = held;
    expect_param(want, t, p, device);
    p.variant.tensors[i].data = data<const char>(t);
    for (int d = 0; d < want.ndim; ++d) p.variant.tensors[i].sizes[d] = t.size(d);
  }
  for (size_t i = 0; i < kScalarParams.size(); ++i) {
    const double value = values[int64_t(kTensorParams.size() + i)].cast<double>();
    if (kScalarParams[i].whole)
      p.variant.scalars[i].whole = int32_t(value);
    else
      p.variant.scalars[i].real = float(value);
  }
}

}  // namespace fi::bind

#define FI_VARIANT_PARAMETERS , Array<Any> variant_values
#define FI_READ_VARIANT(p, device) read_variant(p, device, variant_values)
#else
#define FI_VARIANT_PARAMETERS
#define FI_READ_VARIANT(p, device)
#endif
