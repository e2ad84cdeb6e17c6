// SPDX-License-Identifier: Apache-2.0
// The device and the stream on which a bound function queues its work.
#pragma once
#include <cuda_runtime_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include "tensor_checks.h"

namespace fi::bind {

inline void expect_success(const char* what, cudaError_t error) {
  if (error != cudaSuccess)
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(error) << ": "
                                << cudaGetErrorString(error);
}

// The device of `name`, current while this lives, and the caller's current stream of it.
class CudaCall {
 public:
  CudaCall(const char* name, const TensorView& t) : device_(t.device()) {
    if (!is_cuda(device_))
      TVM_FFI_THROW(ValueError) << name << ": expected a tensor on a CUDA device; got one in "
                                << device_text(device_) << ". Move it with .cuda().";
    expect_success("cudaGetDevice", cudaGetDevice(&before_));
    if (before_ != device_.device_id) expect_success("cudaSetDevice", cudaSetDevice(device_.device_id));
  }
  CudaCall(const CudaCall&) = delete;
  CudaCall& operator=(const CudaCall&) = delete;
  ~CudaCall() {
    if (before_ != device_.device_id) cudaSetDevice(before_);
  }

  DLDevice device() const { return device_; }
  cudaStream_t stream() const {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device_.device_type, device_.device_id));
  }

 private:
  DLDevice device_;
  int before_ = 0;
};

}  // namespace fi::bind
