// SPDX-License-Identifier: Apache-2.0
// How Python hands a planner's configuration over: the int64 vector that it builds once (core/planner.py).
#pragma once
#include <stdexcept>

#include "../core/planner.h"
#include "tensor_checks.h"

namespace fi::bind {

inline constexpr int64_t kConfigFields = 28;

inline PlannerConfig read_config(TensorView config) {
  expect_vector("config", config, kInt64, kConfigFields);
  const auto* v = data<const int64_t>(config);
  PlannerConfig c{};
  c.limits = {v[0], v[1], v[2]};
  c.num_kv_heads = int32_t(v[3]);
  c.group = int32_t(v[4]);
  c.causal = int32_t(v[5]);
  c.window_left = int32_t(v[6]);
  c.invariant_grid = int32_t(v[7]);
  c.num_ctas = int32_t(v[8]);
  c.planned_queues = int32_t(v[9]);
  c.granule = int32_t(v[10]);
  c.min_chunk = int32_t(v[11]);
  c.alpha = int32_t(v[12]);
  for (int i = 0; i < kNumTiles; ++i) c.beta[i] = int32_t(v[13 + i]);
  c.part_cost = int32_t(v[13 + kNumTiles]);
  c.min_tile = int32_t(v[14 + kNumTiles]);
  c.max_tile = int32_t(v[15 + kNumTiles]);
  c.sharing = {v[16 + kNumTiles], v[17 + kNumTiles], v[18 + kNumTiles]};
  c.share_cost = int32_t(v[19 + kNumTiles]);
  c.share_latency = int32_t(v[20 + kNumTiles]);
  c.longest_first = int32_t(v[21 + kNumTiles]);
  c.overlaps = int32_t(v[22 + kNumTiles]);
  return c;
}

// Calls f; what the core finds wrong with its arguments becomes Python's ValueError.
template <class F>
auto refusing(F f) {
  try {
    return f();
  } catch (const std::invalid_argument& e) {
    TVM_FFI_THROW(ValueError) << e.what();
  }
}

}  // namespace fi::bind
