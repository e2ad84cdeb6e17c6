// SPDX-License-Identifier: Apache-2.0
// Rows of page ids, one a request, inside an engine's own table: what LevelParams (params.h) says of them.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace fi {

// Page p of request r is named by indices[row_begin[r] + p * step], its id or its first token slot.
struct PageRows {
  const int32_t* indices;
  const int64_t* row_begin;
  const int64_t* row_end;  // one past the last index that may be read
  int64_t num_indices;
  int32_t step;
};

// Whether the row [begin, end) lies in the table and has so many pages.
FI_HOST_DEVICE bool holds_pages(const PageRows& t, int64_t begin, int64_t end, int32_t pages) {
  return begin >= 0 && begin <= end && end <= t.num_indices && int64_t(pages - 1) * t.step < end - begin;
}

FI_HOST_DEVICE bool holds_pages(const PageRows& t, int32_t request, int32_t pages) {
  return holds_pages(t, t.row_begin[request], t.row_end[request], pages);
}

}  // namespace fi
