// SPDX-License-Identifier: Apache-2.0
// Finds which requests begin with the same pages, in tables that only the device knows: by a cluster of
// thread blocks, or by one. `Block` is one of its thread blocks (collectives.h), which also has
//   cta(), ctas(), sync_cluster(), sync_or(), compare_and_swap(), keep_least() and load_exchanged().
//
// Of each request r it finds the leader, the smallest request that has the longest run of leading pages in
// common with r among those before r, and that run. These say everything: the nodes of the forest are the
// distinct pairs (leader, common), see device_forest_nodes.h. In round after round, requests that go on with
// the same page are grouped, and all are compared with the smallest of the group, or in the first round with
// the leader that a few columns of the table promise (device_samples.h), so that one round mostly suffices.
//
// Nothing is believed that was not compared. Leaders and common pages are right as soon as
//   - each request has exactly `common` pages in common with its leader, which comes before it,
//   - a leader has fewer pages in common with its own leader than the request has with it,
//   - no two requests with the same leader and common pages go on with the same page.
// If the second does not hold, the columns promised too much, and the search starts again without them; if it
// then still does not hold, somebody writes the table, and nothing is shared. Every loop has an end whatever
// other blocks find, for a barrier of a cluster does not wait for blocks that have ended.
#pragma once
#include "compare_rows.h"
#include "compose_rules.h"
#include "device_groups.h"
#include "phases.h"

namespace fi {

// int32 words through which the blocks of a cluster tell each other what they found.
inline constexpr int64_t kExchangeWords = 2 * 4 * kForestRequests;

struct DeviceForestArgs {
  PageRows rows;
  int32_t page_size;
  int32_t max_depth;      // 1 .. kForestDepth
  const int32_t* limits;  // [num_requests], at most so many KV tokens are shared; may be null
  int32_t* exchange;      // kExchangeWords, aligned to 16 bytes
};

struct alignas(16) Comparison {
  int32_t leader;
  int32_t common;  // pages
  int32_t next;    // the page that follows them
  int32_t reserved;
};

// kBeside: the first block of several compares nothing, it has something else to do meanwhile.
template <class Block, bool kBeside>
class ForestFinder {
 public:
  static constexpr int kThreads = Block::kThreads, kLanes = 8;

  FI_DEVICE ForestFinder(Block& block, GroupScan<Block>& scan, const DeviceForestArgs& args,
                         ForestMemory& memory, ForestPairs& pairs)
      : block_(block),
        a_(args),
        m_(memory),
        p_(pairs),
        groups_(block, scan, memory, pairs),
        beside_(kBeside && block.ctas() > 1),
        thread_(block.thread()) {}

  // Returns the number of pairs (leader, common), 0 where nothing is shared; in other blocks than the first
  // it may be anything. Behind pairs lies a barrier. meanwhile: called by the first block, when something is
  // shared.
  template <class Meanwhile>
  FI_DEVICE int32_t run(const PlannerConfig& config, int32_t num_requests, const int32_t* qo_indptr,
                        const int32_t* kv_lens, Meanwhile meanwhile) {
    requests_ = num_requests < kForestRequests ? num_requests : kForestRequests;
    groups_.begin(requests_);
    int32_t longest = 0;
    FI_ROLL
    for (int32_t r = thread_; r < requests_; r += kThreads) {
      const int32_t pages = read_request(config, r, qo_indptr, kv_lens);
      longest = pages > longest ? pages : longest;
    }
    groups_.post_longest(longest);
    FI_PHASE(block_, "read requests");
    LeaderSamples<Block> samples(block_, m_, p_, a_.rows, groups_.slots(), requests_);
    // Blocks that only compare look at the columns in any case: nobody waits for them if nothing is shared.
    const bool early = beside_ && block_.cta() > 0;
    Groups found = groups_.find(
        [&] {
          longest = groups_.posted_longest();
          if (early) samples.load(longest);
        },
        [&] {
          if (early) samples.insert();
        });
    FI_PHASE(block_, "group, look");
    if (!found.some) return 0;
    if (block_.cta() == 0) meanwhile();
    int round = 0;
    FI_ROLL
    for (int attempt = 0; attempt < 2; ++attempt) {
      // Without a group in round n no node has n nodes above it.
      FI_ROLL
      for (int rounds = 0; rounds < a_.max_depth && found.some && !found.broken; ++rounds, ++round) {
        auto* exchange = reinterpret_cast<Comparison*>(a_.exchange) + round % 2 * kForestRequests;
        groups_.take_leaders();
        if (compares()) {
          if (round == 0) {
            if (!early) samples.load(longest);
            if (!early) samples.insert();
            if (!early) block_.sync();
            samples.choose();
          }
          block_.sync();
          FI_PHASE(block_, "leaders of columns");
          compare_all(exchange);
          FI_PHASE(block_, "compare rows");
        }
        block_.sync_cluster();
        FI_PHASE(block_, "cluster barrier");
        FI_ROLL
        for (int32_t r = thread_; r < requests_; r += kThreads) read_comparison(exchange, r);
        groups_.clear();
        FI_PHASE(block_, "results");
        found = groups_.find();
        FI_PHASE(block_, "group, look again");
      }
      if (!found.broken) return found.pairs;
      FI_ROLL
      for (int32_t r = thread_; r < requests_; r += kThreads) start(r, row(r));
      groups_.clear();
      if (thread_ == 0) m_.broken = 0;
      found = groups_.find();
    }
    return 0;
  }

  FI_DEVICE int32_t num_requests() const { return requests_; }

 private:
  FI_DEVICE bool compares() const { return !beside_ || block_.cta() > 0; }
  FI_DEVICE const int32_t* row(int32_t r) const { return a_.rows.indices + a_.rows.row_begin[r]; }

  FI_DEVICE int32_t read_request(const PlannerConfig& config, int32_t r, const int32_t* qo_indptr,
                                 const int32_t* kv_lens) {
    // All loads at once, whether they will be needed or not.
    const int64_t q_len = int64_t(qo_indptr[r + 1]) - qo_indptr[r];
    const int64_t begin = a_.rows.row_begin[r], end = a_.rows.row_end[r];
    const int32_t kv_len = kv_lens[r], limit = a_.limits ? a_.limits[r] : kMaxInt32;
    // Lengths that break a limit are the planner's to report.
    int32_t pages = 0;
    if (q_len >= 1 && q_len <= kMaxQueryTile && kv_len > 0 && is_composable(config, int32_t(q_len))) {
      int32_t tokens = kv_len - int32_t(q_len);
      if (limit < tokens) tokens = limit;
      if (tokens > 0) pages = tokens / a_.page_size;
      if (!holds_pages(a_.rows, begin, end, pages)) pages = 0;
    }
    m_.pages[r] = pages;
    m_.q_len[r] = uint8_t(q_len);
    start(r, a_.rows.indices + begin);
    return pages;
  }

  FI_DEVICE void start(int32_t r, const int32_t* row) {
    const int32_t pages = m_.pages[r];
    m_.leader[r] = -1;
    m_.common[r] = 0;
    m_.next[r] = pages > 0 ? *row : 0;
    m_.state[r] = pages > 0 ? kActive : kDone;
  }

  // kLanes lanes compare a request; neighbours are in different blocks, so that all read alike.
  FI_DEVICE void compare_all(Comparison* found) {
    const int32_t blocks = block_.ctas() - beside_, all = kThreads / kLanes * blocks;
    const int32_t first = thread_ / kLanes * blocks + block_.cta() - beside_;
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += all) {
      const int32_t r = base + first;
      const bool valid = r < requests_ && m_.state[r] == kComparing;
      if (!block_.ballot(valid)) continue;
      const int32_t leader = valid ? m_.leader[r] : 0;
      CommonPages c{nullptr, nullptr, 0, 0, 0};
      if (valid) {
        // Page `common` is compared again in vain, except in the first round.
        const int32_t own = m_.pages[r], other = m_.pages[leader];
        c = {row(r), row(leader), m_.common[r], own < other ? own : other, own};
      }
      compare_rows<kLanes>(block_, a_.rows.step, c);
      if (valid && thread_ % kLanes == 0) found[r] = {leader, c.begin, c.next, 0};
    }
  }

  FI_DEVICE void read_comparison(const Comparison* found, int32_t r) {
    if (m_.state[r] != kComparing) return;
    const Comparison c = block_.load_exchanged(&found[r]);
    const int32_t pages = m_.pages[r];
    if (uint32_t(c.leader) >= uint32_t(r) || c.common < 1 || c.common > pages ||
        c.common > m_.pages[c.leader]) {
      m_.broken = 1;
      return;
    }
    m_.leader[r] = c.leader;
    m_.common[r] = c.common;
    m_.next[r] = c.next;
    m_.state[r] = pages > c.common ? kActive : kDone;
  }

  Block& block_;
  const DeviceForestArgs& a_;
  ForestMemory& m_;
  ForestPairs& p_;
  RequestGroups<Block> groups_;
  const bool beside_;
  const int thread_;
  int32_t requests_ = 0;
};

}  // namespace fi
