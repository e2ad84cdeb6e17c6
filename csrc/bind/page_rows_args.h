// SPDX-License-Identifier: Apache-2.0
// Tensors of a page table to the rows that detection reads.
#pragma once
#include "../core/page_rows.h"
#include "tensor_checks.h"

namespace fi::bind {

inline PageRows page_rows(TensorView indices, TensorView row_begin, TensorView row_end, int64_t step,
                          DLDevice device) {
  expect_device("indices", indices, device);
  expect_dtype("indices", indices, kInt32);
  expect_vector("row_begin", row_begin, kInt64, -1, device);
  expect_vector("row_end", row_end, kInt64, row_begin.size(0), device);
  if (step < 1) TVM_FFI_THROW(ValueError) << "index_step: expected >= 1; got " << step << ".";
  return {data<const int32_t>(indices), data<const int64_t>(row_begin), data<const int64_t>(row_end),
          extent(indices), int32_t(step)};
}

}  // namespace fi::bind
