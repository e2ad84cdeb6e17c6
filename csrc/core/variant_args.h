// SPDX-License-Identifier: Apache-2.0
// What a user passes to the functors of a variant: a block of fixed size inside AttentionParams.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

#include "host_device.h"

namespace fi {

inline constexpr int kMaxVariantScalars = 8, kMaxVariantTensors = 8, kMaxVariantDims = 4;

union VariantScalar {
  float real;
  int32_t whole;
};

struct VariantTensor {
  const void* data;  // row-major; null where an optional tensor was left out
  int64_t sizes[kMaxVariantDims];
};

struct VariantArgs {
  VariantScalar scalars[kMaxVariantScalars];
  VariantTensor tensors[kMaxVariantTensors];
};

// Elements as they are stored; functors see floats.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
FI_DEVICE T to_value(T x) {
  return x;
}
FI_DEVICE int32_t to_value(bool x) { return x; }
FI_DEVICE int32_t to_value(uint8_t x) { return x; }
FI_DEVICE float to_value(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
FI_DEVICE float to_value(Float16 x) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(x.bits));
#else
  _Float16 value;
  memcpy(&value, &x.bits, sizeof(value));
  return float(value);
#endif
}

#if defined(__CUDACC__)
// What is read in place of an element that does not exist.
static __device__ const uint64_t kNoElement = 0;
#endif

// A tensor parameter as a functor sees it. An index outside of it reads as 0: kernels ask about the keys of
// whole tiles, and what they get for keys that do not exist is thrown away.
template <class T, int kDims>
struct TensorArg {
  using Value = decltype(to_value(T{}));
  const VariantTensor& tensor;

  FI_DEVICE explicit operator bool() const { return tensor.data != nullptr; }
  FI_DEVICE int64_t size(int dim) const { return tensor.sizes[dim]; }

  // Element (i, j, ...); one of the indices may be a vector of integers, and so is the result then.
  template <class... Index>
  FI_DEVICE auto operator()(Index... index) const {
    static_assert(sizeof...(Index) == kDims, "give as many indices as the tensor has dimensions");
    return at<0>(int64_t(0), true, index...);
  }
  template <class Index>
  FI_DEVICE auto operator[](Index index) const {
    return (*this)(index);
  }

 private:
#if !defined(__CUDACC__)
  template <int kDim, class Index, class... Rest>
  auto at_each(int64_t offset, bool inside, Index index, Rest... rest) const {
    constexpr int kCount = sizeof(Index) / sizeof(index[0]);
    typedef Value Values __attribute__((vector_size(kCount * sizeof(Value))));
    Values values;
    for (int i = 0; i < kCount; ++i) values[i] = at<kDim>(offset, inside, int64_t(index[i]), rest...);
    return values;
  }
#endif
  template <int kDim>
  FI_DEVICE Value at(int64_t offset, bool inside) const {
    const T* const data = static_cast<const T*>(tensor.data);
#if defined(__CUDACC__)
    // Without a condition, so that a loop need not read anew what stays the same.
    const T *const element = data + offset, *const none = reinterpret_cast<const T*>(&kNoElement);
    return to_value(*(inside & (data != nullptr) ? element : none));
#else
    return inside && data ? to_value(data[offset]) : Value{};
#endif
  }
  template <int kDim, class Index, class... Rest>
  FI_DEVICE auto at(int64_t offset, bool inside, Index index, Rest... rest) const {
#if !defined(__CUDACC__)
    if constexpr (requires { index[0]; })
      return at_each<kDim>(offset, inside, index, rest...);
    else
#endif
    {
      const int64_t i = index;
      return at<kDim + 1>(offset * tensor.sizes[kDim] + i,
                          inside & (uint64_t(i) < uint64_t(tensor.sizes[kDim])), rest...);
    }
  }
};

}  // namespace fi
