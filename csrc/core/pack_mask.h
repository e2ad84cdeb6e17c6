// SPDX-License-Identifier: Apache-2.0
// Boolean masks to bits at fixed places, on every device: request r gets `stride` bytes whatever its size.
#pragma once
#include <cstdint>

#include "host_device.h"

namespace fi {

struct PackMaskParams {
  const uint8_t* mask;  // one byte an element, or null; elements past num_elements are visible
  int64_t num_elements;
  const int64_t* source;     // [requests] first element of each
  const int32_t* qo_indptr;  // [requests + 1]
  const int32_t* kv_lens;    // [requests]
  bool tree;                 // rows of q_len elements: all keys before the queries are visible
  int32_t heads;             // rows of each query token
  uint8_t* bits;             // [requests, stride]
  int64_t stride, num_requests;
  int32_t* mask_kv_len;  // [requests]; -1, which attention takes for a fault, where the bits do not fit
};

// The rows of one request, each of all keys: one for every query token and head.
struct MaskRows {
  int64_t source, num_elements;
  int64_t q_len, rows, kv_len;
  int64_t bytes;  // -1: they do not fit
};

FI_HOST_DEVICE MaskRows mask_rows(const PackMaskParams& p, int64_t request) {
  MaskRows m{p.source[request],
             p.mask ? p.num_elements : 0,
             int64_t(p.qo_indptr[request + 1]) - p.qo_indptr[request],
             0,
             p.kv_lens[request],
             -1};
  if (m.q_len < 0 || m.kv_len < 0) return m;
  m.rows = m.q_len * p.heads;
  const int64_t bytes = (m.rows * m.kv_len + 7) / 8;
  if (bytes <= p.stride) m.bytes = bytes;
  return m;
}

// Eight elements of the flattened matrix; those past its end are 0.
FI_HOST_DEVICE uint8_t mask_byte(const PackMaskParams& p, const MaskRows& m, int64_t byte) {
  const int64_t first = byte * 8, end = m.rows * m.kv_len;
  int64_t row = first / m.kv_len, key = first - row * m.kv_len;
  const int64_t prefix = p.tree ? m.kv_len - m.q_len : 0;
  const int64_t row_len = p.tree ? m.q_len : m.kv_len;
  uint8_t result = 0;
  for (int bit = 0; bit < 8 && first + bit < end; ++bit) {
    bool visible = true;
    if (key >= prefix) {
      const int64_t element = m.source + row * row_len + (key - prefix);
      if (element >= 0 && element < m.num_elements) visible = p.mask[element] != 0;
    }
    result |= uint8_t(visible) << bit;
    if (++key == m.kv_len) {
      key = 0;
      ++row;
    }
  }
  return result;
}

}  // namespace fi
