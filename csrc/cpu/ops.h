// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "../core/operators.h"
#include "../core/pack_mask.h"

namespace fi::cpu {

void append_kv(const AppendParams& params, int num_threads);

void merge_states(const MergeParams& params, int num_threads);

void pack_mask(const PackMaskParams& params);

}  // namespace fi::cpu
