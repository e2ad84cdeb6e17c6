// SPDX-License-Identifier: Apache-2.0
// Finds the prefix forest of a batch in page tables on the host. The device finds the same bytes
// (device_forest.h).
#pragma once
#include <cstdint>
#include <span>

#include "forest.h"
#include "page_rows.h"

namespace fi {

struct ForestSize {
  int32_t nodes;
  int32_t members;
};

// pages[r]: leading pages of request r that may be shared, all within its row. `nodes` has room for one node
// a request, `members` for max_depth a request: nodes below that depth are left out.
ForestSize find_forest(const PageRows& table, std::span<const int32_t> pages, int32_t page_size,
                       int32_t max_depth, ForestNode* nodes, int32_t* members);

}  // namespace fi
