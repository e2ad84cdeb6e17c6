// SPDX-License-Identifier: Apache-2.0
// What the bound functions ask of their tensors. A failed check names the argument, what was expected, what
// came and what to do.
#pragma once
#include <tvm/ffi/tvm_ffi.h>

#include <initializer_list>
#include <sstream>
#include <string>

namespace fi::bind {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline std::string shape_text(const TensorView& t) {
  std::ostringstream out;
  out << "[";
  for (int i = 0; i < t.ndim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "]";
  return out.str();
}

// For texts of errors: tvm-ffi throws for dtypes that it has no name for, which would end the process where
// an error is just being thrown.
inline std::string dtype_text(DLDataType d) {
  if (d.code == kDLComplex) return "complex" + std::to_string(int(d.bits));
  try {
    return tvm::ffi::DLDataTypeToString(d);
  } catch (const tvm::ffi::Error&) {
    return "DLPack's dtype code " + std::to_string(int(d.code)) + " of " + std::to_string(int(d.bits)) +
           " bits";
  }
}

inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kUInt8{kDLUInt, 8, 1};
inline constexpr DLDataType kBool{kDLBool, 8, 1};
inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kFloat16{kDLFloat, 16, 1};
inline constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType kE4M3{kDLFloat8_e4m3fn, 8, 1};
inline constexpr DLDataType kE5M2{kDLFloat8_e5m2, 8, 1};

inline constexpr DLDevice kHost{kDLCPU, 0};

inline bool is_cuda(DLDevice d) { return d.device_type == kDLCUDA; }

inline std::string device_text(DLDevice d) {
  if (d.device_type == kDLCPU) return "host memory";
  if (is_cuda(d)) return "cuda:" + std::to_string(d.device_id);
  return "device type " + std::to_string(int(d.device_type));
}

inline void expect_device(const char* name, const TensorView& t, DLDevice device) {
  const DLDevice got = t.device();
  if (got.device_type != device.device_type || (is_cuda(device) && got.device_id != device.device_id))
    TVM_FFI_THROW(ValueError) << name << ": expected a tensor in " << device_text(device) << "; got one in "
                              << device_text(got) << ". Move it with .to().";
}

inline void expect_host(const char* name, const TensorView& t) { expect_device(name, t, kHost); }

inline void expect_dtype(const char* name, const TensorView& t, DLDataType expected) {
  if (!same_dtype(t.dtype(), expected))
    TVM_FFI_THROW(TypeError) << name << ": expected " << dtype_text(expected) << "; got "
                             << dtype_text(t.dtype()) << ". Convert it with .to().";
}

// -1 in `shape` takes any size.
inline void expect_shape(const char* name, const TensorView& t, std::initializer_list<int64_t> shape) {
  bool same = t.ndim() == int(shape.size());
  int i = 0;
  for (int64_t n : shape) {
    same = same && (n < 0 || t.size(i) == n);
    ++i;
  }
  if (same) return;
  std::ostringstream text;
  text << "[";
  i = 0;
  for (int64_t n : shape) {
    text << (i++ ? ", " : "");
    n < 0 ? text << "any" : text << n;
  }
  TVM_FFI_THROW(ValueError) << name << ": expected shape " << text.str() << "]; got " << shape_text(t) << ".";
}

inline void expect_unit_stride(const char* name, const TensorView& t) {
  const int last = t.ndim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1)
    TVM_FFI_THROW(ValueError) << name << ": expected unit stride in the last dimension; got "
                              << t.stride(last) << ". Call .contiguous() on it.";
}

inline void expect_vector(const char* name, const TensorView& t, DLDataType dtype, int64_t size,
                          DLDevice device = kHost) {
  expect_device(name, t, device);
  expect_dtype(name, t, dtype);
  expect_shape(name, t, {size});
  expect_unit_stride(name, t);
}

// How many elements of `t` may be addressed from its first one.
inline int64_t extent(const TensorView& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim(); ++i) {
    if (t.size(i) == 0) return 0;
    last += (t.size(i) - 1) * t.stride(i);
  }
  return last + 1;
}

template <class T>
T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

}  // namespace fi::bind
