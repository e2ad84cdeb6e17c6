// SPDX-License-Identifier: Apache-2.0
// Finds which requests begin with the same pages, in tables that only the device knows: by a cluster of
// thread blocks, or by one. `Block` is one of its thread blocks (collectives.h), which also has
//   cta(), ctas(), sync_cluster(), sync_or(), compare_and_swap(), keep_least() and load_exchanged(),
//   open_inbox(), wait_for_inboxes(), send(), receive() and leave(), see Inbox,
//   copy_async(), a copy of a word into shared memory that its thread sees behind wait_copies().
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

// int32 words through which the blocks of a cluster tell each other what they found, behind the first round.
inline constexpr int64_t kExchangeWords = 2 * 4 * kForestRequests;

struct DeviceForestArgs {
  PageRows rows;
  int32_t page_size;
  int32_t max_depth;      // 1 .. kForestDepth
  const int32_t* limits;  // [num_requests], at most so many KV tokens are shared; may be null
  int32_t* exchange;      // kExchangeWords, aligned to 16 bytes
};

// What the blocks of a cluster have found in the first round is sent to each of them, without a barrier and
// without a way through global memory. All threads call open_inbox() first, and wait_for_inboxes() before
// they send() or meet in sync_cluster(). Each block gets so many bytes as it has opened for, whatever is
// found, and ends only when they are there: nobody writes to a block that has ended.
struct Inbox {
  uint64_t barrier;
};

// kBeside: the first block of several compares nothing, it has something else to do meanwhile.
template <class Block, bool kBeside>
class ForestFinder {
 public:
  static constexpr int kThreads = Block::kThreads, kLanes = 8, kMostBlocks = 8;

  // received: kForestRequests, of the first round; until pairs are found.
  FI_DEVICE ForestFinder(Block& block, GroupScan<Block>& scan, const DeviceForestArgs& args,
                         ForestMemory& memory, ForestPairs& pairs, Comparison* received, Inbox& inbox)
      : block_(block),
        a_(args),
        m_(memory),
        p_(pairs),
        received_(received),
        inbox_(inbox),
        groups_(block, scan, memory, pairs),
        beside_(kBeside && block.ctas() > 1),
        thread_(block.thread()) {}

  // Returns the number of pairs (leader, common), 0 where nothing is shared; in other blocks than the first
  // it may be anything. Behind pairs lies a barrier. meanwhile(between): called by the first block when
  // something is shared, if it compares nothing; calls between() with a barrier before it and one behind it.
  // All blocks leave() at last.
  template <class Meanwhile>
  FI_DEVICE int32_t run(const PlannerConfig& config, int32_t num_requests, const int32_t* qo_indptr,
                        const int32_t* kv_lens, Meanwhile meanwhile) {
    requests_ = num_requests < kForestRequests ? num_requests : kForestRequests;
    // Blocks that only compare do not ask first whether anything is shared: nobody waits for them if not. Of
    // few requests they ask for the first pages together with those of the other columns.
    const bool early = beside_ && block_.cta() > 0, few = requests_ <= kFewRequests;
    int32_t longest = 0;
    FI_ROLL
    for (int32_t r = thread_;; r += kThreads) {
      Lengths lengths{};
      if (r < requests_) lengths = load_lengths(r, qo_indptr, kv_lens);
      if (r == thread_) {
        // While they come.
        block_.open_inbox(&inbox_, uint32_t(requests_) * sizeof(Comparison));
        groups_.begin(only_here(requests_));
      }
      if (r >= requests_) break;
      const int32_t pages = read_request(config, r, lengths, early && few);
      longest = pages > longest ? pages : longest;
    }
    groups_.post_longest(longest);
    FI_PHASE(block_, "read requests");
    LeaderSamples<Block> samples(block_, m_, p_, a_.rows, groups_.width(), requests_);
    const Comparison* received = nullptr;  // what nobody has taken yet
    bool again = false, restarted = false;
    int round = 0, rounds = 0;
    // Everything that is done in every round stands here once: code costs the time of fetching it.
    FI_ROLL
    for (;; again = true) {
      // Compares before it groups, before it asks what was found, or when something was.
      const int compare_at = again || (beside_ && !early) ? -1 : !early ? 3 : few ? 0 : 2;
      Groups found{};
      FI_ROLL
      for (int step = 0; step < 4; ++step) {
        if (step == compare_at && (early || found.some)) {
          if (step == 0) {
            groups_.meet();
            longest = groups_.posted_longest();
          }
          samples.load(longest);
          if (step == 0) samples.keep_first_pages();
          samples.arrive();
          block_.sync();
          compare_first(samples);
          if (!early) block_.sync();
          FI_PHASE(block_, "compare rows, send");
        } else if (step == 1) {
          groups_.put(received);
          if (compare_at > 1) longest = groups_.posted_longest();
          FI_PHASE(block_, "group");
        } else if (step == (compare_at == 2 ? 3 : 2)) {
          found = groups_.look();
          FI_PHASE(block_, "look");
          if (compare_at < 3) break;
        }
      }
      if (!again && !found.some) {
        if (!beside_) send_nothing();
        return 0;
      }
      // Without a group in round n no node has n nodes above it.
      if (found.some && !found.broken && rounds < a_.max_depth) {
        exchange(round, meanwhile);
        received = round == 0 ? received_ : nullptr;
        ++round;
        ++rounds;
        continue;
      }
      wide_ = found.wide;
      if (!found.broken) return found.pairs;
      if (restarted) return 0;
      restarted = true;
      received = nullptr;
      rounds = 0;
      FI_ROLL
      for (int32_t r = thread_; r < requests_; r += kThreads) start(r, m_.pages[r] > 0 ? *row(r) : 0);
      groups_.clear();
      if (thread_ == 0) m_.broken = 0;
    }
  }

  // Before a block ends.
  FI_DEVICE void leave() {
    if (!received_all_) block_.leave(&inbox_);
  }

  FI_DEVICE int32_t num_requests() const { return requests_; }
  // Behind run(): whether a pair needs more than one word of ForestPairs.
  FI_DEVICE bool wide() const { return wide_; }

 private:
  FI_DEVICE bool compares() const { return !beside_ || block_.cta() > 0; }

  // One round: what each request that is to be compared has in common with its leader.
  template <class Meanwhile>
  FI_DEVICE void exchange(int round, Meanwhile meanwhile) {
    const bool first = round == 0;
    auto* exchange = reinterpret_cast<Comparison*>(a_.exchange) + round % 2 * kForestRequests;
    groups_.take_leaders();
    if (first) {
      if (beside_ && block_.cta() == 0) {
        meanwhile([&] { groups_.clear(); });
        block_.wait_for_inboxes();
      } else {
        block_.sync();
        groups_.clear();
        block_.sync();
      }
      block_.receive(&inbox_);
      received_all_ = true;
    } else {
      if (compares()) {
        block_.sync();
        compare_again(exchange);
      }
      block_.sync_cluster();
      groups_.clear();
      FI_ROLL
      for (int32_t r = thread_; r < requests_; r += kThreads)
        if (m_.state[r] == kComparing) groups_.take(block_.load_exchanged(&exchange[r]), r);
    }
    FI_PHASE(block_, "exchange");
  }

  FI_DEVICE const int32_t* row(int32_t r) const {
    return a_.rows.indices + (requests_ <= kFewRequests ? m_.row_begin[r] : a_.rows.row_begin[r]);
  }

  struct Lengths {
    int64_t begin, end;   // of the row
    int32_t first, last;  // query tokens
    int32_t kv_len, limit;
  };

  // All loads at once, whether they will be needed or not.
  FI_DEVICE Lengths load_lengths(int32_t r, const int32_t* qo_indptr, const int32_t* kv_lens) const {
    return {a_.rows.row_begin[r], a_.rows.row_end[r], qo_indptr[r],
            qo_indptr[r + 1],     kv_lens[r],         a_.limits ? a_.limits[r] : kMaxInt32};
  }

  // lengths_only: without the first page.
  FI_DEVICE int32_t read_request(const PlannerConfig& config, int32_t r, const Lengths& lengths,
                                 bool lengths_only) {
    const int64_t q_len = int64_t(lengths.last) - lengths.first, begin = lengths.begin, end = lengths.end;
    const int32_t kv_len = lengths.kv_len;
    // Asked for before one knows whether it will be needed.
    const int32_t page =
        !lengths_only && begin >= 0 && begin < a_.rows.num_indices ? a_.rows.indices[begin] : 0;
    // Lengths that break a limit are the planner's to report.
    int32_t pages = 0;
    if (q_len >= 1 && q_len <= kMaxQueryTile && kv_len > 0 && is_composable(config, int32_t(q_len))) {
      int32_t tokens = kv_len - int32_t(q_len);
      if (lengths.limit < tokens) tokens = lengths.limit;
      const uint32_t size = uint32_t(a_.page_size);
      // Mostly a power of two: a division is longer.
      if (tokens > 0)
        pages = size & (size - 1) ? int32_t(uint32_t(tokens) / size) : tokens >> lowest_bit(size);
      if (!holds_pages(a_.rows, begin, end, pages)) pages = 0;
    }
    m_.pages[r] = pages;
    if (r < kFewRequests) m_.row_begin[r] = begin;
    m_.q_len[r] = uint8_t(q_len);
    start(r, page);
    return pages;
  }

  // page: the first of its row, if it has pages.
  FI_DEVICE void start(int32_t r, int32_t page) {
    const bool some = m_.pages[r] > 0;
    m_.leader[r] = -1;
    m_.common[r] = 0;
    m_.next[r] = some ? page : 0;
    m_.state[r] = some ? kActive : kDone;
  }

  // A request is for kLanes lanes: visit(the first request of a round, theirs). Neighbours are in different
  // blocks, so that all read alike.
  template <class Visit>
  FI_DEVICE void for_compared(Visit visit) {
    const int32_t blocks = block_.ctas() - beside_, all = kThreads / kLanes * blocks;
    const int32_t first = only_here(thread_) / kLanes * blocks + block_.cta() - beside_;
    FI_ROLL
    for (int32_t base = 0; base < requests_; base += all) visit(base, base + first);
  }

  // With `leader`, or with nobody where that is -1; by whole warps.
  FI_DEVICE Comparison compare(int32_t r, int32_t leader) {
    Comparison result{leader, 0, 0, 0};
    if (!block_.ballot(leader >= 0)) return result;
    // Of nobody: addresses that a compiler knows to be global all the same.
    CommonPages c{a_.rows.indices, a_.rows.indices, 0, 0, 0};
    if (leader >= 0) {
      const int32_t own = m_.pages[r], other = m_.pages[leader];
      // Page `common` is compared again in vain, except in the first round.
      c = {row(r), row(leader), m_.common[r], own < other ? own : other, own};
    }
    compare_rows<kLanes>(block_, a_.rows.step, c);
    result.common = c.begin;
    result.next = c.next;
    return result;
  }

  // With the leaders that the columns promise; behind a barrier.
  FI_DEVICE void compare_first(LeaderSamples<Block>& samples) {
    static_assert(kLanes == LeaderSamples<Block>::kLanes);
    for_compared([&](int32_t base, int32_t r) {
      const Comparison result = compare(r, samples.leader(r));
      // Not before: what waits for a cluster empties a cache.
      if (base == 0) block_.wait_for_inboxes();
      send(r, result);
    });
    if (requests_ == 0) block_.wait_for_inboxes();
  }

  FI_DEVICE void compare_again(Comparison* found) {
    for_compared([&](int32_t, int32_t r) {
      const bool valid = r < requests_ && m_.state[r] == kComparing;
      const Comparison result = compare(r, valid ? m_.leader[r] : -1);
      if (valid && thread_ % kLanes == 0) found[r] = result;
    });
  }

  FI_DEVICE void send_nothing() {
    block_.wait_for_inboxes();
    for_compared([&](int32_t, int32_t r) { send(r, {-1, 0, 0, 0}); });
  }

  // To a block a lane.
  FI_DEVICE void send(int32_t r, const Comparison& result) {
    static_assert(kLanes >= kMostBlocks);
    const int lane = thread_ % kLanes;
    if (r < requests_ && lane < block_.ctas()) block_.send(&received_[r], result, &inbox_, lane);
  }

  Block& block_;
  const DeviceForestArgs& a_;
  ForestMemory& m_;
  ForestPairs& p_;
  Comparison* const received_;
  Inbox& inbox_;
  RequestGroups<Block> groups_;
  const bool beside_;
  const int thread_;
  int32_t requests_ = 0;
  bool received_all_ = false, wide_ = false;
};

}  // namespace fi
