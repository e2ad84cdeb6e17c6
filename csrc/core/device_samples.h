// SPDX-License-Identifier: Apache-2.0
// A guess of every request's leader from a few columns of the page table; by one block. Where caches of
// prefixes fill the table, equal pages at one depth mean equal pages before it. Then the smallest request
// with the same page in the deepest of the columns where there is one is the leader, unless rows part
// between two columns. Where there is room for a table of first pages, they need no groups (device_groups.h).
#pragma once
#include "collectives.h"
#include "page_rows.h"
#include "plan_rules.h"

namespace fi {

inline constexpr int32_t kForestRequests = 1024;  // requests behind them share nothing
inline constexpr int32_t kForestDepth = 8;        // most nodes above each other

// The least requests of hash tables, -1 where there is none: one of groups from 0 on and one of pairs from
// kPairSlots on, each of at most kPairSlots; columns take all behind the groups for a while.
inline constexpr int kLog2PairSlots = 11;
inline constexpr int32_t kPairSlots = 1 << kLog2PairSlots;
inline constexpr int32_t kForestSlots = 2 * kPairSlots;

static_assert(kPairSlots == 2 * kForestRequests);

// Of a batch of so many, blocks keep in shared memory where rows begin, and the first pages are a column:
// then candidate() asks for no groups.
inline constexpr int32_t kFewRequests = 256;

enum RequestState : uint8_t { kDone, kActive, kComparing };

struct alignas(16) ForestMemory {
  int32_t pages[kForestRequests];  // that may be shared
  int32_t next[kForestRequests];   // the page behind those in common with the leader
  int32_t table[kForestSlots];
  int32_t leader[kForestRequests];  // -1: none
  int32_t common[kForestRequests];  // pages in common with the leader
  int16_t slot[kForestRequests];
  int16_t pair_slot[kForestRequests];
  uint8_t state[kForestRequests];  // RequestState
  uint8_t q_len[kForestRequests];  // query tokens, where pages > 0
  int32_t broken;
  int64_t row_begin[kFewRequests];  // of few requests
};

// The distinct pairs of a leader and the pages in common with it, in any order.
struct alignas(16) ForestPairs {
  // A leader and the pages, as far as one word holds both.
  static constexpr int kPageBits = 22;
  static_assert(kForestRequests <= 1 << (32 - kPageBits));
  union {
    uint32_t key[kForestRequests];
    int32_t page[kPairSlots];  // of the columns
  };
  union {
    int16_t first[kForestRequests];  // the smallest request with the pair
    int16_t slot[kPairSlots];        // of the columns' pages
  };
  uint8_t leads[kForestRequests];  // by request: whether it is a leader
};

template <class Block>
class LeaderSamples {
 public:
  static constexpr int kThreads = Block::kThreads, kMost = 5;
  static constexpr int32_t kNobody = (kMost + 2) * kForestRequests;

  // slots: of the table of groups, a power of two from 64 on, at least two a request.
  FI_DEVICE LeaderSamples(Block& block, ForestMemory& memory, ForestPairs& pairs, const PageRows& rows,
                          int32_t slots, int32_t requests)
      : block_(block),
        m_(memory),
        p_(pairs),
        rows_(rows),
        slots_(slots),
        width_(slots / 2),
        log2_(count_bits(uint32_t(slots / 2 - 1))),
        requests_(requests),
        thread_(block.thread()) {
    const int32_t tables = (kForestSlots / 2 >> log2_) - 1;
    // Of many requests those behind the first pages alone.
    first_ = width_ <= kFewRequests;
    columns_ = first_ ? kMost + 1 : tables;
  }

  // Asks for the pages, which insert() waits for: they come without registers, so that the loop stays one.
  // longest: pages of a row. Behind a barrier behind row_begin.
  FI_DEVICE void load(int32_t longest) {
    // Known divisors.
    unit_ = first_ ? longest / (2 * kMost) : columns_ == 3 ? longest / 6 : longest / 2;
    if (unit_ < 1) unit_ = 1;
    FI_ROLL
    for (int32_t task = thread_; task < columns_ * width_; task += kThreads)
      if (is_in_row(task))
        block_.copy_async(&p_.page[task],
                          &rows_.indices[begin(request(task)) + int64_t(depth(task)) * rows_.step]);
  }

  // Of the first pages: notes what they are.
  FI_DEVICE void keep_first_pages() {
    block_.wait_copies();
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads)
      if (m_.pages[r] > 0) m_.next[r] = p_.page[r];
  }

  FI_DEVICE void insert() {
    block_.wait_copies();
    const int32_t tasks = columns_ * width_;
    FI_ROLL
    for (int32_t base = 0; base < tasks; base += kThreads) insert(base + thread_);
  }

  // Behind a barrier: the least of what lanes 0 .. 7 get says which leader a request is to be compared with:
  // that of the deepest column, or the smallest of its group; kNobody where there is none before it.
  FI_DEVICE int32_t candidate(int32_t r, int lane) const {
    static_assert(kMost + 1 < 8);
    if (r >= requests_ || m_.state[r] != kActive) return kNobody;
    const int32_t smallest = first_ ? r : m_.table[m_.slot[r]];
    if (!first_ && smallest == r) return kNobody;
    if (lane < columns_) {
      const int32_t slot = p_.slot[lane * width_ + r];
      const int32_t least = slot < 0 ? r : m_.table[slot] & (kForestRequests - 1);
      if (least < r) return (columns_ - 1 - lane) * kForestRequests + least;
    }
    return first_ ? kNobody : (kMost + 1) * kForestRequests + smallest;
  }
  static FI_DEVICE int32_t leader(int32_t least) {
    return least < kNobody ? least & (kForestRequests - 1) : -1;
  }

 private:
  FI_DEVICE int64_t begin(int32_t r) const { return first_ ? m_.row_begin[r] : rows_.row_begin[r]; }

  // A task is a request in a column; the tasks of a warp are in one.
  FI_DEVICE int32_t request(int32_t task) const { return task & (width_ - 1); }
  FI_DEVICE int32_t column(int32_t task) const { return task >> log2_; }
  FI_DEVICE int32_t depth(int32_t task) const {
    const int32_t deep = column(task) - first_;
    return deep < 0 ? 0 : unit_ * (2 * deep + 1);
  }

  FI_DEVICE bool is_in_row(int32_t task) const {
    return task < columns_ * width_ && request(task) < requests_ && depth(task) < m_.pages[request(task)];
  }

  // By whole warps. A word of the table is the lower bits of a page and the smallest request that has it, for
  // a guess needs no more.
  FI_DEVICE void insert(int32_t task) {
    constexpr uint32_t kPageBits = 0x1fffff;
    const bool valid = is_in_row(task);
    const uint32_t lanes = block_.ballot(valid);
    int32_t slot = -1;
    if (lanes) {
      const uint32_t bits = valid ? uint32_t(p_.page[task]) & kPageBits : 0;
      const int32_t table = slots_ * (1 + column(task));
      const int first = lowest_bit(lanes), lane = thread_ % kWarp;
      const uint32_t first_bits = block_.shuffle(bits, first);
      const bool alike = !block_.ballot(valid && bits != first_bits);
      if (valid && (!alike || lane == first))
        slot = take_slot(table, int32_t(bits * kForestRequests) | request(task));
      if (alike) {
        const int32_t common = block_.shuffle(slot, first);
        if (valid) slot = common;
      }
    }
    if (task < columns_ * width_) p_.slot[task] = int16_t(slot);
  }

  FI_DEVICE int32_t take_slot(int32_t table, int32_t word) {
    const uint32_t bits = uint32_t(word) / kForestRequests, hash = bits * 0x9e3779b1u;
    int32_t slot = int32_t((hash ^ hash >> 15) & uint32_t(slots_ - 1));
    FI_ROLL
    for (int32_t tried = 0; tried < slots_; ++tried, slot = (slot + 1) & (slots_ - 1)) {
      // Most find a smaller request there, and need no turn at the word.
      int32_t* const to = &m_.table[table + slot];
      int32_t there = *to;
      if (there < 0) there = block_.compare_and_swap(to, -1, word);
      if (there < 0) break;
      if (uint32_t(there) / kForestRequests != bits) continue;
      if (word < there) block_.keep_least(to, word);
      break;
    }
    return table + slot;
  }

  Block& block_;
  ForestMemory& m_;
  ForestPairs& p_;
  const PageRows& rows_;
  const int32_t slots_, width_, log2_, requests_;
  bool first_;
  int32_t columns_, unit_ = 1;
  const int thread_;
};

}  // namespace fi
