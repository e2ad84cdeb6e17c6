// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include "../core/fast_divide.h"
#include "../core/params.h"

namespace fi::sm80 {

// Stands for the row of a key that is not read.
inline constexpr uint32_t kNoRow = 0xffffffff;

// What the launcher derives from the parameters.
struct LaunchConstants {
  FastDivide group;
  FastDivide page_size;
  FastDivide index_divisor;
  FastDivide num_kv_heads;
  int64_t k_page_bytes, v_page_bytes, k_head_bytes, v_head_bytes, k_token_bytes, v_token_bytes;
  // K and V have the same strides, and a row's distance from the first one fits into 32 bits of 16 bytes.
  bool one_offset;
};

// item: bytes of an element of the caches.
inline LaunchConstants launch_constants(const AttentionParams& p, int64_t item) {
  LaunchConstants c{};
  c.group = FastDivide(p.group);
  c.page_size = FastDivide(p.level.page_size);
  c.index_divisor = FastDivide(p.level.index_divisor);
  c.num_kv_heads = FastDivide(p.num_kv_heads);
  c.k_page_bytes = p.k_stride_page * item;
  c.v_page_bytes = p.v_stride_page * item;
  c.k_head_bytes = p.k_stride_head * item;
  c.v_head_bytes = p.v_stride_head * item;
  c.k_token_bytes = p.k_stride_token * item;
  c.v_token_bytes = p.v_stride_token * item;
  const int64_t reach = p.level.num_pages * c.k_page_bytes + p.level.page_size * c.k_token_bytes;
  c.one_offset = reach < int64_t(kNoRow) * 16 && c.k_page_bytes == c.v_page_bytes &&
                 c.k_head_bytes == c.v_head_bytes && c.k_token_bytes == c.v_token_bytes &&
                 c.k_page_bytes >= 0 && c.k_token_bytes >= 0;
  return c;
}

// Loads the kernel on the current device, which a capture must not do; launch() does it where it is not done.
cudaError_t prepare();

// Starts the persistent kernel on `num_ctas` CTAs; the plan has been uploaded on the same stream.
cudaError_t launch(const AttentionParams& params, int num_ctas, cudaStream_t stream);

}  // namespace fi::sm80
