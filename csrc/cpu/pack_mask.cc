// SPDX-License-Identifier: Apache-2.0
#include "../core/pack_mask.h"

#include "ops.h"

namespace fi::cpu {

void pack_mask(const PackMaskParams& p) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const MaskRows m = mask_rows(p, r);
    p.mask_kv_len[r] = m.bytes < 0 ? -1 : int32_t(m.kv_len);
    for (int64_t byte = 0; byte < m.bytes; ++byte) p.bits[r * p.stride + byte] = mask_byte(p, m, byte);
  }
}

}  // namespace fi::cpu
