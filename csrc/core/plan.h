// SPDX-License-Identifier: Apache-2.0
// The plan: one contiguous buffer that the planner writes and the kernels read. Plain data, no pointers.
#pragma once
#include <cstdint>

namespace fi {

inline constexpr int32_t kPlanMagic = 0x50494621;
inline constexpr int32_t kPlanVersion = 6;
inline constexpr int32_t kMaxQueryTile = 128;
inline constexpr int kBundleSizes = 3;

enum WorkItemFlags : uint8_t {
  // The first chunk of its query tile. A kernel moves its begin down to the true start of the window,
  // which lies lower than the planned one when the host knew only an upper bound of the KV length.
  kFirstChunk = 1,
  // The last chunk of its query tile; an item of an unsplit tile has both flags. A kernel moves its end to
  // the true one, the length or the causal limit of the last row, which lies elsewhere than planned when
  // lengths changed on the device. In the batch-invariant mode a later chunk of a split tile ends inside its
  // last grid chunk all the same: the states that it may write are counted by the plan.
  kLastChunk = 2,
  // An item of a prefix node: `request` is the node's index, packed rows count within the node, `unit` is an
  // index into the reports. Its KV range is exact; no row needs a mask.
  kPrefix = 4,
  // The first own item of a composed request, in place of kFirstChunk: its begin is exact and never moves,
  // for the keys before it belong to the request's nodes. Legal while kv_len - q_len >= kv_begin.
  kSuffix = 8,
};

// Words of the counters. kFaults: what a launch or the device planner met in lengths that only the device has
// seen.
enum Counter : int32_t { kTicket = 0, kFaults = 1, kArrivals = 2 };

// Bits of the faults that the device planner sets; those below are KernelFault's. A plan with one of them has
// no items, so that its launch writes nothing.
enum PlannerFault : int32_t {
  kFaultStarts = 1 << 8,   // qo_indptr begins below 0 or decreases
  kFaultTokens = 1 << 9,   // more query tokens than max_tokens
  kFaultKvLens = 1 << 10,  // a KV length below 0 or above max_kv_len
};

// (level, query tile, KV chunk) -> one partial or final attention state of every KV head.
struct WorkItem {
  uint8_t flags;      // WorkItemFlags
  uint8_t tile_log2;  // query tile height Tq = 1 << tile_log2, from {1, 16, 32, 64, 128}
  uint16_t q_rows;    // packed query rows in use, 1 .. Tq
  int32_t request;    // row group, or the index of a prefix node
  int32_t q_begin;    // first packed row of the tile in its request or node; row = token * group + head
  int32_t kv_begin;   // KV tokens [kv_begin, kv_end) of the request
  int32_t kv_end;
  int32_t partial;  // first row of the partial states, or -1: write the final output
  int32_t unit;     // merge unit that this item reports to, or -1; kPrefix: its list in the reports
  int32_t cost;     // alpha * Tq + beta * KV tokens, saturated
};
static_assert(sizeof(WorkItem) == 32);

// Reduction map: packed rows [q_begin, q_begin + q_rows) of a request are the ordered left fold of the
// partial states parts[parts_begin .. parts_end), each part being the first of q_rows consecutive rows.
// The last of num_items work items to finish merges the unit. A composed request has one unit, whose parts
// are the states of its nodes from the root on, chunk by chunk, and then its own. A node item reports to the
// units of all its rows, once for each tile that holds some of them.
struct MergeUnit {
  int32_t request;
  int32_t q_begin;
  int32_t q_rows;
  int32_t num_items;
  int32_t parts_begin;
  int32_t parts_end;
  // Composed: the query token from which the nodes take the request's rows. Where qo_indptr says another one
  // when the kernel runs, they took other rows: kFaultLengths. -1: not composed.
  int32_t token;
  int32_t reserved;
};
static_assert(sizeof(MergeUnit) == 32);

// A shared prefix that is read once for the rows of all its members. Packed row i * group + head of the node
// is query token node_tokens[tokens_begin + i]. An item of chunk c has its states at first + c * num_tokens *
// group + q_begin: those of a chunk lie in row order whatever the tiles.
struct PrefixNode {
  int32_t request;  // in whose row the pages are looked up
  int32_t tokens_begin;
  int32_t num_tokens;
  int32_t kv_end;  // of the node's keys; those before it are keys of its members, too
};
static_assert(sizeof(PrefixNode) == 16);

struct PlanHeader {
  int32_t magic;
  int32_t version;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t num_items;
  int32_t num_units;
  int32_t num_parts;
  int32_t num_partial_rows;
  int32_t chunk;           // KV tokens of a full chunk
  int32_t num_ctas;        // CTAs the plan was balanced for
  int32_t num_kv_heads;    // a ticket is (item, KV head): num_items * num_kv_heads of them
  int32_t group;           // query heads of one KV head
  int32_t invariant_grid;  // chunk grid of the batch-invariant mode in KV tokens, or 0
  int32_t num_queues;      // queues of Algorithm 1, or 0 when CTAs draw items by ticket
  int32_t max_kv_len;      // longest request of the plan
  int32_t num_nodes;       // 0: no request is composed
  int32_t num_node_tokens;
  int32_t num_reports;
  // How many items from the end on a kernel may draw for 2, 4 and 8 KV heads at once: 2^k heads of one of
  // them cost too little to unbalance the CTAs. A ticket of 2^k heads counts as one.
  int32_t bundled[kBundleSizes];
  int32_t reserved[14 - kBundleSizes];
};
static_assert(sizeof(PlanHeader) == 128);

// What a plan may hold at most. Follows at construction from the limits that the user states.
struct PlanCapacity {
  int32_t requests;
  int32_t items;
  int32_t units;
  int32_t parts;
  int32_t partial_rows;
  int32_t queues;         // 0 without planned queues
  int32_t queue_entries;  // 0 without planned queues
  int32_t nodes;          // 0 without sharing, as the next two
  int32_t node_tokens;
  int32_t reports;
  int32_t counters;  // kArrivals + units * KV heads
};
inline constexpr int kCapacityFields = 11;

// Byte offsets of the sections in the plan buffer; a function of the capacity alone, so that they are
// constants inside a captured graph.
struct PlanLayout {
  int64_t header;
  int64_t items;
  int64_t units;
  int64_t parts;          // int32, num_parts
  int64_t kv_len_bounds;  // int32, num_requests: the KV lengths that the plan was made for
  int64_t queue_begin;    // int32, num_queues + 1
  int64_t queue_entries;  // int32, item * num_kv_heads + KV head
  int64_t nodes;          // PrefixNode, num_nodes
  int64_t node_tokens;    // int32, num_node_tokens: a query token, counted over all requests
  int64_t reports;        // int32, num_reports: lists of merge units, each after its length
  // int32: the ticket, the faults, then the arrivals of each (unit, KV head). Zeroed by every plan, so that
  // an aborted launch cannot poison the next step; ticket and arrivals are reset by every launch as well.
  // The one section that kernels write.
  int64_t counters;
  int64_t total;
};

inline constexpr int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline constexpr PlanLayout plan_layout(const PlanCapacity& c) {
  PlanLayout l{};
  l.header = 0;
  l.items = sizeof(PlanHeader);
  l.units = align_up(l.items + int64_t(c.items) * int64_t(sizeof(WorkItem)), 128);
  l.parts = align_up(l.units + int64_t(c.units) * int64_t(sizeof(MergeUnit)), 128);
  l.kv_len_bounds = align_up(l.parts + int64_t(c.parts) * 4, 128);
  l.queue_begin = align_up(l.kv_len_bounds + int64_t(c.requests) * 4, 128);
  l.queue_entries = align_up(l.queue_begin + (c.queues ? int64_t(c.queues) + 1 : 0) * 4, 128);
  l.nodes = align_up(l.queue_entries + int64_t(c.queue_entries) * 4, 128);
  l.node_tokens = align_up(l.nodes + int64_t(c.nodes) * int64_t(sizeof(PrefixNode)), 128);
  l.reports = align_up(l.node_tokens + int64_t(c.node_tokens) * 4, 128);
  l.counters = align_up(l.reports + int64_t(c.reports) * 4, 128);
  l.total = align_up(l.counters + int64_t(c.counters) * 4, 128);
  return l;
}

}  // namespace fi
