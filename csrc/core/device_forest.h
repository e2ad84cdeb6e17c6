// SPDX-License-Identifier: Apache-2.0
// Finds which requests begin with the same pages, in tables that only the device knows: by a cluster of
// thread blocks, or by one. `Block` is one of its thread blocks (collectives.h), which also has
//   cta(), ctas(), sync_cluster(), sync_or(), compare_and_swap(), keep_least() and load_exchanged().
//
// Of each request r it finds the leader, the smallest request that has the longest run of leading pages in
// common with r among those before r, and that run. These say everything: the nodes of the forest are the
// distinct pairs (leader, common), see device_forest_nodes.h. In round after round, requests that go on with
// the same page are grouped, and all are compared with the smallest of the group.
#pragma once
#include "collectives.h"
#include "compose_rules.h"
#include "page_rows.h"

namespace fi {

inline constexpr int32_t kForestRequests = 1024;  // requests behind them share nothing
inline constexpr int32_t kForestDepth = 8;        // most nodes above each other
inline constexpr int32_t kForestSlots = 2 * kForestRequests;

// int32 words through which the blocks of a cluster tell each other what they found.
inline constexpr int64_t kExchangeWords = 2 * 2 * kForestRequests;

struct DeviceForestArgs {
  PageRows rows;
  int32_t page_size;
  int32_t max_depth;      // 1 .. kForestDepth
  const int32_t* limits;  // [num_requests], at most so many KV tokens are shared; may be null
  int32_t* exchange;      // kExchangeWords, aligned to 8 bytes
};

struct alignas(8) Comparison {
  int32_t common;  // pages
  int32_t next;    // the page that follows them
};

struct ForestMemory {
  int32_t pages[kForestRequests];   // that may be shared
  int32_t leader[kForestRequests];  // -1: none
  int32_t common[kForestRequests];  // pages in common with the leader
  int32_t next[kForestRequests];
  int16_t slot[kForestRequests];
  uint8_t state[kForestRequests];
  int32_t owner[kForestSlots];  // of a hash table: a request with the key of the slot, or -1
  int32_t least[kForestSlots];  // the smallest request with that key
};

template <class Block>
class ForestFinder {
 public:
  static constexpr int kThreads = Block::kThreads;

  FI_DEVICE ForestFinder(Block& block, const DeviceForestArgs& args, ForestMemory& memory)
      : block_(block), a_(args), m_(memory), thread_(block.thread()), lane_(thread_ % kWarp) {}

  // Whether some request has a leader. Ends with a barrier, behind which leader and common are valid in every
  // block of the cluster.
  FI_DEVICE bool run(const PlannerConfig& config, int32_t num_requests, const int32_t* qo_indptr,
                     const int32_t* kv_lens) {
    requests_ = num_requests < kForestRequests ? num_requests : kForestRequests;
    mask_ = kWarp - 1;
    FI_ROLL
    while (mask_ + 1 < 2 * requests_) mask_ = 2 * mask_ + 1;
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) read_request(config, r, qo_indptr, kv_lens);
    // Without a group in round n no node has n nodes above it.
    int round = 0;
    FI_ROLL
    for (; round < a_.max_depth && find_groups(); ++round) {
      auto* found = reinterpret_cast<Comparison*>(a_.exchange) + round % 2 * kForestRequests;
      if (requests_ * kWarp <= kThreads * block_.ctas())
        compare_all<kWarp>(found);
      else
        compare_all<kWarp / 2>(found);
      block_.sync_cluster();
      FI_ROLL
      for (int32_t r = thread_; r < requests_; r += kThreads) read_comparison(found, r);
    }
    block_.sync();
    return round > 0;
  }

  FI_DEVICE int32_t num_requests() const { return requests_; }

  // After a barrier behind clear_table(), by whole warps: finds the slot of the requests that are equal to
  // `request`, where that is `active`.
  template <class Equal>
  FI_DEVICE void find_slot(int32_t request, bool active, uint32_t hash, Equal equal) {
    const uint32_t valid = block_.ballot(active);
    if (!valid) return;
    // Mostly the requests of a warp are equal: the smallest one stands for all, instead of all that meet at
    // one word.
    const int first = lowest_bit(valid);
    const int32_t smallest = block_.shuffle(request, first);
    if (block_.ballot(active && !equal(smallest))) {
      if (active) m_.slot[request] = int16_t(take_slot(request, hash, equal));
    } else {
      int32_t slot = 0;
      if (lane_ == first) slot = take_slot(request, hash, equal);
      slot = block_.shuffle(slot, first);
      if (active) m_.slot[request] = int16_t(slot);
    }
  }

  FI_DEVICE void clear_table() {
    FI_ROLL
    for (int32_t i = thread_; i <= mask_; i += kThreads) {
      m_.owner[i] = -1;
      m_.least[i] = kMaxInt32;
    }
  }

 private:
  enum State : uint8_t { kDone, kActive, kComparing };

  template <class Equal>
  FI_DEVICE int32_t take_slot(int32_t request, uint32_t hash, Equal equal) {
    int32_t slot = int32_t((hash ^ hash >> 15) & uint32_t(mask_));
    FI_ROLL
    for (;; slot = (slot + 1) & mask_) {
      const int32_t owner = block_.compare_and_swap(&m_.owner[slot], -1, request);
      if (owner < 0 || equal(owner)) break;
    }
    block_.keep_least(&m_.least[slot], request);
    return slot;
  }

  FI_DEVICE const int32_t* row(int32_t r) const { return a_.rows.indices + a_.rows.row_begin[r]; }
  FI_DEVICE int32_t entry(const int32_t* row, int32_t p) const { return row[int64_t(p) * a_.rows.step]; }

  FI_DEVICE void read_request(const PlannerConfig& config, int32_t r, const int32_t* qo_indptr,
                              const int32_t* kv_lens) {
    const int64_t q_len = int64_t(qo_indptr[r + 1]) - qo_indptr[r];
    const int32_t kv_len = kv_lens[r];
    // Lengths that break a limit are the planner's to report.
    int32_t pages = 0;
    if (q_len >= 1 && q_len <= kMaxQueryTile && kv_len > 0 && is_composable(config, int32_t(q_len))) {
      int32_t tokens = kv_len - int32_t(q_len);
      if (a_.limits && a_.limits[r] < tokens) tokens = a_.limits[r];
      if (tokens > 0) pages = tokens / a_.page_size;
      if (!holds_pages(a_.rows, r, pages)) pages = 0;
    }
    m_.pages[r] = pages;
    m_.leader[r] = -1;
    m_.common[r] = 0;
    m_.next[r] = pages > 0 ? entry(row(r), 0) : 0;
    m_.state[r] = pages > 0 ? kActive : kDone;
  }

  // Whether some request now has a leader to be compared with. Requests that are equal so far and go on with
  // the same page are a group.
  FI_DEVICE bool find_groups() {
    clear_table();
    block_.sync();
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += kThreads) {
      const int32_t r = base + thread_;
      const bool active = r < requests_ && m_.state[r] == kActive;
      uint32_t hash = 0;
      if (active)
        hash = uint32_t(m_.next[r]) * 0x9e3779b1u ^ uint32_t(m_.common[r]) * 0x85ebca6bu ^
               uint32_t(m_.leader[r]) * 0xc2b2ae35u;
      find_slot(r, active, hash, [&](int32_t other) {
        return m_.next[other] == m_.next[r] && m_.common[other] == m_.common[r] &&
               m_.leader[other] == m_.leader[r];
      });
    }
    block_.sync();
    bool found = false;
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
      if (m_.state[r] != kActive) continue;
      const int32_t leader = m_.least[m_.slot[r]];
      m_.state[r] = leader == r ? kDone : kComparing;
      if (leader == r) continue;
      m_.leader[r] = leader;
      found = true;
    }
    return block_.sync_or(found);
  }

  // kLanes lanes compare a request; neighbours are in different blocks, so that all read alike.
  template <int kLanes>
  FI_DEVICE void compare_all(Comparison* found) {
    const int32_t all = kThreads / kLanes * block_.ctas();
    const int32_t first = thread_ / kLanes * block_.ctas() + block_.cta();
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += all) {
      const int32_t r = base + first;
      const bool valid = r < requests_ && m_.state[r] == kComparing;
      if (!block_.ballot(valid)) continue;
      const Comparison c = compare<kLanes>(r, valid);
      if (valid && thread_ % kLanes == 0) found[r] = c;
    }
  }

  // Called by whole warps, whose parts of kLanes lanes compare requests of their own.
  template <int kLanes>
  FI_DEVICE Comparison compare(int32_t r, bool valid) {
    constexpr int kUnroll = 16;  // loads of a lane under way, as many again of the leader's row
    const int sub_lane = thread_ % kLanes;
    const int32_t leader = valid ? m_.leader[r] : 0;
    const int32_t* const own = valid ? row(r) : nullptr;
    const int32_t* const other = valid ? row(leader) : nullptr;
    int32_t begin = 0, end = 0, next = 0;
    bool differ = false;
    if (valid) {
      begin = m_.common[r] + 1;
      end = m_.pages[r] < m_.pages[leader] ? m_.pages[r] : m_.pages[leader];
    }
    FI_ROLL
    while (block_.ballot(begin < end)) {
      int32_t a[kUnroll], b[kUnroll];
      FI_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        // Past the longest rows it would leave the positive numbers.
        const uint32_t p = uint32_t(begin) + uint32_t(i * kLanes + sub_lane);
        const bool inside = p < uint32_t(end);
        a[i] = inside ? entry(own, int32_t(p)) : 0;
        b[i] = inside ? entry(other, int32_t(p)) : 0;
      }
      int32_t at = kMaxInt32, page = 0;
      FI_UNROLL
      for (int i = kUnroll - 1; i >= 0; --i) {
        if (a[i] == b[i]) continue;
        at = i * kLanes + sub_lane;
        page = a[i];
      }
      if (block_.ballot(at < kMaxInt32)) {
        FI_ROLL
        for (int d = kLanes / 2; d > 0; d /= 2) {
          const int32_t there = block_.shuffle(at, lane_ ^ d);
          at = there < at ? there : at;
        }
        page = block_.shuffle(page, lane_ - sub_lane + at % kLanes);
      }
      if (at < kMaxInt32) {
        begin = end = begin + at;
        next = page;
        differ = true;
      } else {
        begin = end - begin > kUnroll * kLanes ? begin + kUnroll * kLanes : end;
      }
    }
    if (valid && !differ && m_.pages[r] > begin) next = entry(own, begin);
    return {begin, next};
  }

  FI_DEVICE void read_comparison(const Comparison* found, int32_t r) {
    if (m_.state[r] != kComparing) return;
    const Comparison c = block_.load_exchanged(&found[r]);
    m_.common[r] = c.common;
    m_.next[r] = c.next;
    m_.state[r] = m_.pages[r] > c.common ? kActive : kDone;
  }

  Block& block_;
  const DeviceForestArgs& a_;
  ForestMemory& m_;
  const int thread_, lane_;
  int32_t requests_ = 0, mask_ = 0;
};

}  // namespace fi
