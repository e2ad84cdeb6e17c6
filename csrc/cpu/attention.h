// SPDX-License-Identifier: Apache-2.0
// The CPU executor of a plan. One module holds one (query dtype, KV dtype, variant).
#pragma once
#include <string>

#include "../core/params.h"

namespace fi::cpu {

// Why this launch may not start, or nothing. Reads lengths and, with check_pages, every page id that the
// launch would read.
std::string find_error(const AttentionParams& params, int64_t num_tokens, bool check_pages);

// Executes the plan with this many threads. `params` has passed find_error().
void run_attention(const AttentionParams& params, int num_threads);

}  // namespace fi::cpu
