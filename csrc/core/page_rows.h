// SPDX-License-Identifier: Apache-2.0
// Rows of page ids, one a request, inside an engine's own table: what LevelParams (params.h) says of them.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace fi {

// Page p of request r is indices[row_begin[r] + p * step] / divisor.
struct PageRows {
  const int32_t* indices;
  const int64_t* row_begin;
  const int64_t* row_end;  // one past the last index that may be read
  int64_t num_indices;
  int32_t step;
  int32_t divisor;
};

// Pages whose ids lie in the row of a request; 0 where its bounds are no range of the table.
FI_HOST_DEVICE int64_t row_pages(const PageRows& t, int32_t request) {
  const int64_t begin = t.row_begin[request], end = t.row_end[request];
  if (begin < 0 || end < begin || end > t.num_indices) return 0;
  return (end - begin + t.step - 1) / t.step;
}

}  // namespace fi
