// SPDX-License-Identifier: Apache-2.0
#include "../cuda/read_bandwidth.h"
#include "cuda_call.h"

namespace fi {
namespace {

// data: contiguous uint8, a multiple of 16 bytes; sink: int32 [1] on the same device.
void read_all(bind::TensorView data, bind::TensorView sink, int64_t num_sms) {
  const bind::CudaCall call("data", data);
  bind::expect_vector("data", data, bind::kUInt8, -1, call.device());
  bind::expect_vector("sink", sink, bind::kInt32, 1, call.device());
  const auto address = reinterpret_cast<uintptr_t>(bind::data<const char>(data));
  if (address % 16 || data.size(0) % 16)
    TVM_FFI_THROW(ValueError) << "data: expected whole and aligned groups of 16 bytes; got " << data.size(0)
                              << " bytes at an address that is " << address % 16 << " modulo 16";
  bind::expect_success("read_all", launch_read_all(bind::data<const char>(data), size_t(data.size(0)),
                                                   bind::data<int32_t>(sink), int(num_sms), call.stream()));
}

}  // namespace
}  // namespace fi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_all, fi::read_all);
