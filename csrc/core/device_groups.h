// SPDX-License-Identifier: Apache-2.0
// Groups of requests that are equal so far and go on with the same page, and the distinct pairs of a leader
// and the pages in common with it; by each block of a cluster for itself.
#pragma once
#include "collectives.h"
#include "device_samples.h"

namespace fi {

// What a request has in common with its leader.
struct alignas(16) Comparison {
  int32_t leader;
  int32_t common;  // pages
  int32_t next;    // the page that follows them
  int32_t reserved;
};

struct Groups {
  bool some;      // a request has a leader to be compared with
  bool broken;    // leaders contradict each other
  bool wide;      // some pairs need more than one word
  int32_t pairs;  // in any order in ForestPairs; without groups they are final
};

template <class Block>
using GroupScan = Collectives<Block, 6>;

template <class Block>
class RequestGroups {
 public:
  static constexpr int kThreads = Block::kThreads;

  FI_DEVICE RequestGroups(Block& block, GroupScan<Block>& scan, ForestMemory& memory, ForestPairs& pairs)
      : block_(block), scan_(scan), m_(memory), p_(pairs), thread_(block.thread()), lane_(thread_ % kWarp) {}

  // A phase before anything else; clears the tables.
  FI_DEVICE void begin(int32_t requests) {
    requests_ = requests;
    // At least two warps, so that a warp's tasks are of one table.
    log2_slots_ = 1 + bit_width(uint32_t(requests > kWarp ? requests - 1 : kWarp - 1));
    width_ = 1 << (log2_slots_ - 1);
    clear_tables();
    if (thread_ == 0) m_.broken = 0;
  }

  // A power of two, not below the number of requests.
  FI_DEVICE int32_t width() const { return width_; }

  // The greatest of all: posted before a meet() or put(), read right behind it.
  FI_DEVICE void post_longest(int32_t pages) { scan_.post(2, block_.warp_max(uint32_t(pages))); }
  FI_DEVICE void meet() { scan_.meet(); }
  FI_DEVICE int32_t posted_longest() { return int32_t(block_.warp_max(uint32_t(scan_.posted(2)))); }

  // Between two calls of put().
  FI_DEVICE void clear() {
    log2_slots_ = kLog2PairSlots;
    clear_tables();
  }

  // Puts requests into tables; begins and ends with a barrier. received: null, or of all requests what they
  // are first, as take() does; then it does not begin with one.
  FI_DEVICE void put(const Comparison* received) {
    // Where the leader, common pages and next page of request r stand, r << step behind these.
    const int32_t* leaders = m_.leader;
    const int32_t* commons = m_.common;
    const int32_t* nexts = m_.next;
    int step = 0;
    if (received) {
      leaders = &received->leader;
      commons = &received->common;
      nexts = &received->next;
      step = 2;
    } else {
      scan_.meet();
    }
    // A half of the threads to each table, where that is enough.
    FI_ROLL
    for (int32_t base = 0; base < 2 * width_; base += kThreads) {
      const int32_t task = base + thread_, r = task & (width_ - 1), own = r << step;
      const bool pairs = task >= width_, valid = task < 2 * width_ && r < requests_;
      bool listed = valid;
      Comparison c{};
      if (valid) {
        c = received ? received[r] : Comparison{leaders[own], commons[own], nexts[own], 0};
        if (received) {
          const bool fits = is_possible(c, r);
          if (!pairs) take(c, fits, r);
          listed = fits && (pairs || c.common < m_.pages[r]);
        } else {
          listed = pairs ? c.leader >= 0 : m_.state[r] == kActive;
        }
      }
      if (!block_.ballot(listed)) continue;
      const int32_t of_groups = pairs ? 0 : -1;  // bits of a page that matter
      const uint32_t hash = uint32_t(c.common) * 0x85ebca6bu + uint32_t(c.leader) * 0xc2b2ae35u +
                            uint32_t(c.next & of_groups) * 0x9e3779b1u;
      // Without conditions between loads, which would wait for each other.
      find_slot(pairs ? m_.table + kPairSlots : m_.table, pairs ? m_.pair : m_.slot, r, listed, hash,
                [&](int32_t other) {
                  other <<= step;
                  return (((nexts[other] ^ c.next) & of_groups) | (commons[other] ^ c.common) |
                          (leaders[other] ^ c.leader)) == 0;
                });
    }
    block_.sync();
  }

  // What a request that is to be compared has in common with its leader.
  FI_DEVICE void take(const Comparison& c, int32_t r) { take(c, is_possible(c, r), r); }

  // Behind put(). Where pairs were found, ends with a barrier.
  FI_DEVICE Groups look() {
    constexpr uint32_t kSome = 1, kBroken = 2, kWide = 4;  // fields of Groups
    uint32_t seen = 0;
    int32_t pairs = 0, base = 0;
    FI_ROLL
    do {
      const int32_t r = base + thread_;
      uint32_t at[1] = {0}, total[1];
      int32_t leader = -1, common = 0;
      if (r < requests_) {
        leader = m_.leader[r];
        common = m_.common[r];
        // All loads that one can do at once.
        const bool active = m_.state[r] == kActive, led = leader >= 0;
        const int32_t slot = active ? m_.slot[r] : 0, pair = led ? m_.pair[r] : 0;
        const int32_t group = m_.table[slot], same = m_.table[kPairSlots + pair];
        const int32_t above = m_.common[led ? leader : r];
        if (active && group != r) seen |= kSome;
        if (led && above >= common) seen |= kBroken;
        at[0] = led && same == r;
        m_.pair[r] = int16_t(led ? same : -1);
      }
      const bool first = at[0];
      if (first && common >> ForestPairs::kPageBits) seen |= kWide;
      if (m_.broken) seen |= kBroken;
      scan_.post(1, block_.warp_or(seen));
      scan_.exclusive_scan(at, total);
      if (first) {
        p_.first[pairs + int32_t(at[0])] = int16_t(r);
        p_.key[pairs + int32_t(at[0])] = uint32_t(leader) << ForestPairs::kPageBits | uint32_t(common);
      }
      pairs += int32_t(total[0]);
      base += kThreads;
    } while (base < requests_);
    seen = block_.warp_or(uint32_t(scan_.posted(1)));
    // Without pairs nobody reads on what another thread has left.
    if (seen & kBroken || pairs > 0) block_.sync();
    return {bool(seen & kSome), bool(seen & kBroken), bool(seen & kWide), pairs};
  }

  // Each request of a group is to be compared with the smallest one.
  FI_DEVICE void take_leaders() {
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
      if (m_.state[r] != kActive) continue;
      const int32_t leader = m_.table[m_.slot[r]];
      m_.state[r] = leader == r ? kDone : kComparing;
      if (leader != r) m_.leader[r] = leader;
    }
  }

 private:
  FI_DEVICE bool is_possible(const Comparison& c, int32_t r) const {
    const bool before = uint32_t(c.leader) < uint32_t(r);
    const int32_t own = m_.pages[r], other = m_.pages[before ? c.leader : r];
    return before && c.common >= 1 && c.common <= (own < other ? own : other);
  }

  FI_DEVICE void take(const Comparison& c, bool possible, int32_t r) {
    if (possible) {
      m_.leader[r] = c.leader;
      m_.common[r] = c.common;
      m_.next[r] = c.next;
      m_.state[r] = m_.pages[r] > c.common ? kActive : kDone;
    } else if (m_.state[r] == kComparing) {
      m_.leader[r] = -1;
      m_.broken = 1;
    }
  }

  FI_DEVICE void clear_tables() {
    struct alignas(16) Four {
      int32_t slot[4];
    };
    FI_ROLL
    for (int32_t i = thread_; i < kForestSlots / 4; i += kThreads)
      reinterpret_cast<Four*>(m_.table)[i] = {-1, -1, -1, -1};
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) p_.last[r] = ForestPairs::kNoNode;
  }

  // Finds the slot of the requests that are equal to `request`, where that is `active`, by whole warps. A
  // slot holds the smallest of the requests with its key.
  template <class Equal>
  FI_DEVICE void find_slot(int32_t* table, int16_t* slots, int32_t request, bool active, uint32_t hash,
                           Equal equal) {
    const uint32_t valid = block_.ballot(active);
    // Mostly the requests of a warp are equal: the smallest one stands for all, instead of all that meet at
    // one word.
    const int first = lowest_bit(valid);
    const int32_t smallest = block_.shuffle(request, first);
    if (block_.ballot(active && !equal(smallest))) {
      if (active) slots[request] = int16_t(take_slot(table, request, hash, equal));
    } else {
      int32_t slot = 0;
      if (lane_ == first) slot = take_slot(table, request, hash, equal);
      slot = block_.shuffle(slot, first);
      if (active) slots[request] = int16_t(slot);
    }
  }

  template <class Equal>
  FI_DEVICE int32_t take_slot(int32_t* table, int32_t request, uint32_t hash, Equal equal) {
    // The upper bits of products: those of pages in turn are spread evenly.
    int32_t slot = int32_t(hash >> (32 - log2_slots_));
    const int32_t mask = (1 << log2_slots_) - 1;
    FI_ROLL
    for (int32_t tried = 0; tried < mask; ++tried, slot = (slot + 1) & mask) {
      const int32_t there = block_.compare_and_swap(&table[slot], -1, request);
      if (there < 0) break;
      if (!equal(there)) continue;
      if (request < there) block_.keep_least(&table[slot], request);
      break;
    }
    return slot;
  }

  Block& block_;
  GroupScan<Block>& scan_;
  ForestMemory& m_;
  ForestPairs& p_;
  const int thread_, lane_;
  int32_t requests_ = 0, width_ = 0, log2_slots_ = 0;  // width_: requests, a power of two
};

}  // namespace fi
