// SPDX-License-Identifier: Apache-2.0
// A guess of a request's leader from a few columns of the page table; by one block. Where caches of prefixes
// fill the table, equal pages at one depth mean equal pages before it. Then the smallest request with the
// same page in the deepest of the columns where there is one is the leader, unless rows part between two
// columns. Where first pages are a column too, the guess needs no groups (device_groups.h).
#pragma once
#include "compare_rows.h"
#include "page_rows.h"
#include "plan_rules.h"

namespace fi {

inline constexpr int32_t kForestRequests = 1024;  // requests behind them share nothing
inline constexpr int32_t kForestDepth = 8;        // most nodes above each other

// The least requests of hash tables, -1 where there is none: one of groups from 0 on and one of pairs from
// kPairSlots on, each of at most kPairSlots.
inline constexpr int kLog2PairSlots = 11;
inline constexpr int32_t kPairSlots = 1 << kLog2PairSlots;
inline constexpr int32_t kForestSlots = 2 * kPairSlots;

static_assert(kPairSlots == 2 * kForestRequests);

// Of a batch of so many, blocks keep in shared memory where rows begin, and the first pages are a column:
// then leader() asks for no groups.
inline constexpr int32_t kFewRequests = 256;

enum RequestState : uint8_t { kDone, kActive, kComparing };

struct alignas(16) ForestMemory {
  int32_t pages[kForestRequests];  // that may be shared
  int32_t next[kForestRequests];   // the page behind those in common with the leader
  int32_t table[kForestSlots];
  int32_t leader[kForestRequests];  // -1: none
  int32_t common[kForestRequests];  // pages in common with the leader
  int16_t slot[kForestRequests];
  int16_t pair[kForestRequests];   // its slot, and when pairs are known the smallest request with it, or -1
  uint8_t state[kForestRequests];  // RequestState
  uint8_t q_len[kForestRequests];  // query tokens, where pages > 0
  int32_t broken;
  int64_t row_begin[kFewRequests];  // of few requests
};

// The distinct pairs of a leader and the pages in common with it, in any order.
struct alignas(16) ForestPairs {
  // A leader and the pages, as far as one word holds both.
  static constexpr int kPageBits = 22;
  static constexpr int32_t kNoNode = kMaxInt32;
  static_assert(kForestRequests <= 1 << (32 - kPageBits));
  union {
    uint32_t key[kForestRequests];
    int32_t page[kPairSlots];  // of the columns
  };
  int16_t first[kForestRequests];  // the smallest request with the pair
  int32_t last[kForestRequests];   // by request: the complement of its last node as a leader, or kNoNode
};

template <class Block>
class LeaderSamples {
 public:
  static constexpr int kThreads = Block::kThreads, kLanes = 8;

  // width: a power of two from 32 on, not below the number of requests.
  FI_DEVICE LeaderSamples(Block& block, ForestMemory& memory, ForestPairs& pairs, const PageRows& rows,
                          int32_t width, int32_t requests)
      : block_(block),
        m_(memory),
        p_(pairs),
        rows_(rows),
        width_(width),
        log2_(count_bits(uint32_t(width - 1))),
        requests_(requests),
        // Of many requests groups say what a column of first pages would.
        first_(width <= kFewRequests),
        columns_(first_                    ? kMost + 1
                 : width <= kPairSlots / 4 ? 3
                                           : 1),
        thread_(block.thread()) {}

  // Asks for the pages, which arrive() waits for: they come without registers, so that the loop stays one.
  // longest: pages of a row. Behind a barrier behind row_begin.
  FI_DEVICE void load(int32_t longest) {
    // Known divisors.
    unit_ = first_ ? longest / (2 * kMost) : columns_ == 3 ? longest / 6 : longest / 2;
    if (unit_ < 1) unit_ = 1;
    FI_ROLL
    for (int32_t task = thread_; task < columns_ * width_; task += kThreads) {
      if (is_in_row(task))
        block_.copy_async(&p_.page[task],
                          &rows_.indices[begin(request(task)) + int64_t(depth(task)) * rows_.step]);
      else
        p_.page[task] = kNoPage;
    }
  }

  // Of the first pages: notes what they are.
  FI_DEVICE void keep_first_pages() {
    block_.wait_copies();
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads)
      if (m_.pages[r] > 0) m_.next[r] = p_.page[r];
  }

  FI_DEVICE void arrive() { block_.wait_copies(); }

  // Behind a barrier, by whole warps, kLanes lanes a request, the greatest one at last: with which leader it
  // is to be compared, or -1. Columns are halved, since a request that has nobody at one depth has nobody
  // behind.
  FI_DEVICE int32_t leader(int32_t r) {
    const bool valid = r < requests_ && m_.state[r] == kActive;
    const int32_t last = block_.shuffle(r, kWarp - 1);
    int32_t found = valid && !first_ ? m_.table[m_.slot[r]] : r;
    int32_t low = 0, high = valid && (first_ || found < r) ? columns_ : 0;
    FI_ROLL
    while (block_.ballot(low < high)) {
      const int32_t column = (low + high) / 2;
      const int32_t least = least_of_lanes<kLanes>(block_, least_of_lane(column, r, last));
      if (low < high && least < r) {
        found = least;
        low = column + 1;
      } else {
        high = column;
      }
    }
    return valid && found < r ? found : -1;
  }

 private:
  static constexpr int kMost = 5;
  // Of a row that ends before; no page has a number below 0.
  static constexpr int32_t kNoPage = -1;
  static_assert((kMost + 1) * kFewRequests <= kPairSlots);

  FI_DEVICE int64_t begin(int32_t r) const { return first_ ? m_.row_begin[r] : rows_.row_begin[r]; }

  // A task is a request in a column.
  FI_DEVICE int32_t request(int32_t task) const { return task & (width_ - 1); }
  FI_DEVICE int32_t depth(int32_t task) const {
    const int32_t deep = (task >> log2_) - first_;
    return deep < 0 ? 0 : unit_ * (2 * deep + 1);
  }

  FI_DEVICE bool is_in_row(int32_t task) const {
    return request(task) < requests_ && depth(task) < m_.pages[request(task)];
  }

  // The least of the requests up to r with the same page, among those that this lane looks at; r or more
  // where there is none. By whole warps; last: not below any of their requests.
  FI_DEVICE int32_t least_of_lane(int32_t column, int32_t r, int32_t last) {
    constexpr int kFours = 4, kRequests = 4 * kFours * kLanes;
    const int32_t* const pages = &p_.page[column < columns_ ? column * width_ : 0];
    const int32_t own = r < width_ ? pages[r] : kNoPage, first = 4 * (thread_ % kLanes);
    int32_t least = r;
    FourPages four[kFours]{};  // here, where it costs nothing
    // From the last ones on, so that the least request is the last one that is found.
    FI_ROLL
    for (int32_t base = (last < width_ ? last : width_ - 1) & -kRequests; base >= 0; base -= kRequests) {
      if (own != kNoPage) {
        FI_UNROLL
        for (int i = 0; i < kFours; ++i) {
          // Behind a narrow column its last ones again, under numbers above r.
          const int32_t at = base + first + i * 4 * kLanes, end = width_ - 4;
          four[i] = *reinterpret_cast<const FourPages*>(pages + (at < end ? at : end));
        }
      }
      block_.sync_warp();  // as in compare_fours()
      if (own != kNoPage) {
        FI_UNROLL
        for (int i = kFours - 1; i >= 0; --i) FI_UNROLL
        for (int k = 3; k >= 0; --k)
          if (four[i].page[k] == own) least = base + first + i * 4 * kLanes + k;
      }
    }
    return least;
  }

  Block& block_;
  ForestMemory& m_;
  ForestPairs& p_;
  const PageRows& rows_;
  const int32_t width_, log2_, requests_;
  const bool first_;
  const int32_t columns_;
  int32_t unit_ = 1;
  const int thread_;
};

}  // namespace fi
