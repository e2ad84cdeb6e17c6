// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "../core/operators.h"

namespace fi::cpu {

void append_kv(const AppendParams& params, int num_threads);

void merge_states(const MergeParams& params, int num_threads);

}  // namespace fi::cpu
