// SPDX-License-Identifier: Apache-2.0
// The scratch memory of a launch: its partial states. Layers that run one after another may share it.
#pragma once
#include <cstdint>

#include "plan.h"

namespace fi {

struct ScratchLayout {
  int64_t partial_lse;  // float [partial_rows, num_kv_heads]
  int64_t partial_out;  // float [partial_rows, num_kv_heads, head_dim_v]
  int64_t total;
};

inline constexpr ScratchLayout scratch_layout(const PlanCapacity& c, int32_t num_kv_heads,
                                              int32_t head_dim_v) {
  const int64_t states = int64_t(c.partial_rows) * num_kv_heads;
  ScratchLayout l{};
  l.partial_lse = 0;
  l.partial_out = align_up(l.partial_lse + states * 4, 128);
  l.total = align_up(l.partial_out + states * head_dim_v * 4, 128);
  return l;
}

}  // namespace fi
