// SPDX-License-Identifier: Apache-2.0
// The functors that fill the holes of the attention template; one source for the host and the device.
#pragma once
#include <cstdint>

#include "params.h"

#if defined(__CUDACC__)
#define FI_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FI_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fi {

// Where a logit stands. Positions count the request's tokens from 0; kv_pos of query token i is
// kv_len - q_len + i (bottom-right alignment), so q_pos may be negative when q_len > kv_len.
struct LogitIndex {
  int32_t request;
  int32_t q_token;  // within the request
  int32_t q_pos;
  int32_t kv_pos;
  int32_t qo_head;
  int32_t kv_head;
};

}  // namespace fi
