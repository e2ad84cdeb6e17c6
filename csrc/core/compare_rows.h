// SPDX-License-Identifier: Apache-2.0
// How many leading pages two rows of a page table have in common, found by some lanes of a warp.
#pragma once
#include "collectives.h"
#include "plan_rules.h"

namespace fi {

// Pages [begin, end) of both rows are to be compared; then `begin` is the first one that differs, or `end`,
// and `next` is the page of the own row there, if it has one.
struct CommonPages {
  const int32_t* own;
  const int32_t* other;
  int32_t begin, end;
  int32_t own_pages;
  int32_t next = 0;
};

struct alignas(16) FourPages {
  int32_t page[4];
};

// The least value of kLanes lanes.
template <int kLanes, class Block>
FI_DEVICE int32_t least_of_lanes(Block& block, int32_t v) {
  FI_ROLL
  for (int d = kLanes / 2; d > 0; d /= 2) {
    const int32_t there = block.shuffle(v, (block.thread() % kWarp) ^ d);
    v = there < v ? there : v;
  }
  return v;
}

// Steps over equal pages in fours, of rows that begin at a multiple of 16 bytes. What is left are fewer than
// four pages, or none behind which `next` is known. Returns whether it is.
template <int kLanes, class Block>
FI_DEVICE bool compare_fours(Block& block, CommonPages& c, bool wide) {
  // Loads of a lane under way, as many again of the other row: as many as the planner's kernel has registers
  // for. More would be spilled; nvcc 13.0 spills four of them for 10.x and 12.x.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr int kUnroll = 2;
#else
  constexpr int kUnroll = 4;
#endif
  const int lane = only_here(block.thread() % kLanes);
  int32_t at = c.begin / 4, end = wide ? c.end / 4 : at;
  bool found = false;
  FI_ROLL
  while (block.ballot(at < end)) {
    int32_t differs = kMaxInt32;
    FourPages a[kUnroll], b[kUnroll];
    if (at < end) {
      FI_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        // Behind the end the last one again, in place of a condition: if it differs, it does so before.
        const int32_t four = at + i * kLanes + lane, last = end - 1;  // below 2^29 + 64
        a[i] = reinterpret_cast<const FourPages*>(c.own)[four < last ? four : last];
        b[i] = reinterpret_cast<const FourPages*>(c.other)[four < last ? four : last];
      }
    }
    // All loads stay before it: to save registers a compiler would wait for a pair before it asks for
    // another.
    block.sync_warp();
    if (at < end) {
      FI_UNROLL
      for (int i = kUnroll - 1; i >= 0; --i) {
        int32_t bits = 0;
        FI_UNROLL
        for (int k = 0; k < 4; ++k) bits |= a[i].page[k] ^ b[i].page[k];
        if (bits) differs = i;
      }
      if (differs < kUnroll) differs = differs * kLanes + lane;
    }
    if (block.ballot(differs < kMaxInt32)) differs = least_of_lanes<kLanes>(block, differs);
    if (differs < kMaxInt32) {
      // Which of the four it is and what follows is read again, from the L1 cache: code that every four would
      // run is longer. Where somebody writes the table meanwhile, any of them will do that lies in the rows.
      const int32_t four = at + differs < end ? at + differs : end - 1;
      const FourPages own = reinterpret_cast<const FourPages*>(c.own)[four];
      const FourPages other = reinterpret_cast<const FourPages*>(c.other)[four];
      int32_t page = 3;
      c.next = own.page[3];
      FI_UNROLL
      for (int k = 2; k >= 0; --k)
        if (own.page[k] != other.page[k]) {
          page = k;
          c.next = own.page[k];
        }
      // Pages before `begin` are equal as well.
      c.begin = c.end = 4 * four + page;
      found = true;
      at = end;
    } else {
      at = end - at > kUnroll * kLanes ? at + kUnroll * kLanes : end;
    }
  }
  if (!found && c.begin < 4 * end) c.begin = 4 * end;
  return found;
}

// One page a load.
template <int kLanes, int kUnroll, class Block>
FI_DEVICE void compare_pages(Block& block, int32_t step, CommonPages& c) {
  const int lane = only_here(block.thread() % kLanes);
  FI_ROLL
  while (block.ballot(c.begin < c.end)) {
    int32_t a[kUnroll], b[kUnroll];
    const int64_t first = (int64_t(c.begin) + lane) * step, stride = int64_t(kLanes) * step;
    FI_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      // Past the longest rows it would leave the positive numbers.
      const bool inside = uint32_t(c.begin) + uint32_t(i * kLanes + lane) < uint32_t(c.end);
      a[i] = inside ? c.own[first + i * stride] : 0;
      b[i] = inside ? c.other[first + i * stride] : 0;
    }
    int32_t differs = kMaxInt32;
    FI_UNROLL
    for (int i = kUnroll - 1; i >= 0; --i)
      if (a[i] != b[i]) differs = i * kLanes + lane;
    if (block.ballot(differs < kMaxInt32)) differs = least_of_lanes<kLanes>(block, differs);
    if (differs < kMaxInt32)
      c.begin = c.end = c.begin + differs;
    else
      c.begin = c.end - c.begin > kUnroll * kLanes ? c.begin + kUnroll * kLanes : c.end;
  }
}

// Called by whole warps, whose parts of kLanes lanes compare rows of their own; step: between two pages of a
// row, in entries of the table.
template <int kLanes, class Block>
FI_DEVICE void compare_rows(Block& block, int32_t step, CommonPages& c) {
  static_assert(kLanes >= 4);
  const bool wide =
      step == 1 && (reinterpret_cast<uintptr_t>(c.own) | reinterpret_cast<uintptr_t>(c.other)) % 16 == 0;
  const bool found = compare_fours<kLanes>(block, c, wide);
  if (block.ballot(!wide && c.begin < c.end)) compare_pages<kLanes, 8>(block, step, c);
  compare_pages<kLanes, 1>(block, step, c);
  // Mostly in a cache: it lies beside the page that was compared last.
  if (!found) c.next = c.begin < c.own_pages ? c.own[int64_t(c.begin) * step] : 0;
}

}  // namespace fi
