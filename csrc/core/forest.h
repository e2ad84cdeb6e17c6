// SPDX-License-Identifier: Apache-2.0
// The prefix forest of a batch: which requests have equal leading pages, and how far.
#pragma once
#include <cstdint>

namespace fi {

// Requests members[member_begin .. member_end), two or more and ascending, read the same pages for the KV
// tokens [begin, end), multiples of the page size. A root begins at 0, a child where its parent ends, and its
// members are members of the parent. A forest lists its nodes by their first member, those with the same one
// from the root on, so that parents come before their children.
struct ForestNode {
  int32_t parent;  // -1: root
  int32_t begin, end;
  int32_t member_begin, member_end;
};
static_assert(sizeof(ForestNode) == 20);

}  // namespace fi
