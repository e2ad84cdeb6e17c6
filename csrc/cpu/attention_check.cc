// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>
#include <vector>

#include "../core/variant.h"
#include "attention.h"

namespace fi::cpu {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

std::string check_plan(const AttentionParams& p, const PlanHeader& h) {
  if (h.magic != kPlanMagic || h.version != kPlanVersion)
    return "plan: expected a plan of version " + str(kPlanVersion) + "; got a buffer with version " +
           str(h.version) + ". Call plan() before run().";
  if (h.num_requests != p.num_requests)
    return "kv_lens: expected the " + str(h.num_requests) + " requests of the plan; got " +
           str(p.num_requests) + ". Call plan() again when the batch changes.";
  if (h.num_kv_heads != p.num_kv_heads || h.group != p.group)
    return "plan: expected " + str(p.num_kv_heads) + " KV heads and a group of " + str(p.group) +
           "; got a plan for " + str(h.num_kv_heads) + " and " + str(h.group) + ".";
  return {};
}

// Kernels step over keys by whole tiles in 32 bits.
constexpr int32_t kMaxKvLen = std::numeric_limits<int32_t>::max() - 127;

// In the batch-invariant mode the plan counts the partial states, so that a request must not outgrow it.
std::string check_lengths(const AttentionParams& p, const PlanHeader& h, const int32_t* bounds,
                          int64_t num_tokens) {
  const LevelParams& level = p.level;
  if (p.qo_indptr[0] < 0) return "qo_indptr[0]: expected >= 0; got " + str(p.qo_indptr[0]) + ".";
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const auto at = [r](const char* name) { return std::string(name) + "[" + str(r) + "]: expected "; };
    if (p.qo_indptr[r + 1] < p.qo_indptr[r])
      return "qo_indptr[" + str(r + 1) + "]: expected a non-decreasing sequence; got " +
             str(p.qo_indptr[r + 1]) + " after " + str(p.qo_indptr[r]) + ".";
    if (level.kv_lens[r] < 0) return at("kv_lens") + ">= 0; got " + str(level.kv_lens[r]) + ".";
    if (level.kv_lens[r] > kMaxKvLen)
      return at("kv_lens") + "at most " + str(kMaxKvLen) + "; got " + str(level.kv_lens[r]) + ".";
    if (h.invariant_grid > 0 && level.kv_lens[r] > bounds[r])
      return at("kv_lens") + "at most " + str(bounds[r]) +
             ", the length that the batch-invariant plan was made for; got " + str(level.kv_lens[r]) +
             ". Plan with an upper bound of the lengths.";
    if (level.row_begin[r] < 0 || level.row_end[r] < level.row_begin[r])
      return at("row_end") + ">= row_begin = " + str(level.row_begin[r]) + " >= 0; got " +
             str(level.row_end[r]) + ".";
    const int64_t pages = (level.row_end[r] - level.row_begin[r] + level.index_step - 1) / level.index_step;
    if (p.qo_indptr[r + 1] > p.qo_indptr[r] && level.kv_lens[r] > pages * level.page_size)
      return at("kv_lens") + "at most " + str(pages * level.page_size) + ", the capacity of its " +
             str(pages) + " pages of " + str(level.page_size) + " tokens; got " + str(level.kv_lens[r]) + ".";
    if (level.num_pages < 1 && p.qo_indptr[r + 1] > p.qo_indptr[r] && level.kv_lens[r] > 0)
      return at("kv_lens") + "0, since k_cache has no pages; got " + str(level.kv_lens[r]) + ".";
  }
  if (p.qo_indptr[p.num_requests] > num_tokens)
    return "qo_indptr[" + str(p.num_requests) + "]: expected at most the " + str(num_tokens) +
           " tokens of q; got " + str(p.qo_indptr[p.num_requests]) + ".";
  return {};
}

// A request that has grown since the plan has rows that no item would write.
std::string check_coverage(const AttentionParams& p, const PlanHeader& h, const int32_t* bounds) {
  const auto* items = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items);
  thread_local std::vector<int64_t> planned, last_tile;
  planned.assign(size_t(p.num_requests), 0);
  last_tile.assign(size_t(p.num_requests), 0);
  for (int32_t i = 0; i < h.num_items; ++i) {
    if (items[i].flags & kPrefix) continue;
    const size_t r = size_t(items[i].request);
    planned[r] = std::max<int64_t>(planned[r], int64_t(items[i].q_begin) + items[i].q_rows);
    last_tile[r] = std::max<int64_t>(last_tile[r], items[i].q_begin);
  }
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int64_t tokens = int64_t(p.qo_indptr[r + 1]) - p.qo_indptr[r];
    if (tokens * p.group > planned[size_t(r)])
      return "qo_indptr: expected at most the " + str(planned[size_t(r)] / p.group) +
             " query tokens that request " + str(r) + " was planned with; got " + str(tokens) +
             ". Call plan() again when query lengths grow.";
    // A causal tile but the last ends before the length. Where the plan counts the partial states, that end
    // must not move right.
    const int64_t planned_tokens = planned[size_t(r)] / p.group;
    const int64_t first = p.level.kv_lens[r] - tokens, planned_first = bounds[r] - planned_tokens;
    if (h.invariant_grid > 0 && p.causal && tokens > 0 && first > planned_first && last_tile[size_t(r)] > 0)
      return "qo_indptr: expected the first query of request " + str(r) + " at position " +
             str(planned_first) + " or before, as planned; got " + str(first) +
             ". Call plan() again when query lengths shrink and KV lengths do not, for the batch-invariant "
             "mode "
             "counts partial states when it plans.";
  }
  return {};
}

// The nodes of composed requests hold planned rows and keys: neither may have moved since.
std::string check_nodes(const AttentionParams& p, const PlanHeader& h) {
  const LevelParams& level = p.level;
  const auto* nodes = reinterpret_cast<const PrefixNode*>(p.plan + p.layout.nodes);
  const auto* units = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units);
  const auto* items = reinterpret_cast<const WorkItem*>(p.plan + p.layout.items);
  for (int32_t i = 0; i < h.num_nodes; ++i) {
    const int32_t r = nodes[i].request;
    const int64_t entries = level.row_end[r] - level.row_begin[r];
    const int64_t held = (entries + level.index_step - 1) / level.index_step * level.page_size;
    if (std::min<int64_t>(level.kv_lens[r], held) < nodes[i].kv_end)
      return "kv_lens[" + str(r) + "]: expected at least the " + str(nodes[i].kv_end) +
             " tokens of the planned prefix; got " + str(level.kv_lens[r]) + " in a row of " + str(held) +
             ". Call plan() again when shared pages go.";
  }
  for (int32_t i = 0; i < h.num_units; ++i) {
    const int32_t r = units[i].request;
    if (units[i].token >= 0 && p.qo_indptr[r + 1] > p.qo_indptr[r] && p.qo_indptr[r] != units[i].token)
      return "qo_indptr[" + str(r) + "]: expected " + str(units[i].token) +
             ", as planned, since the request shares a prefix; got " + str(p.qo_indptr[r]) +
             ". Call plan() again when query lengths change.";
  }
  for (int32_t i = 0; h.num_nodes > 0 && i < h.num_items; ++i) {
    if (!(items[i].flags & kSuffix)) continue;
    const int32_t r = items[i].request, q_len = p.qo_indptr[r + 1] - p.qo_indptr[r];
    if (q_len > 0 && level.kv_lens[r] - q_len < items[i].kv_begin)
      return "kv_lens[" + str(r) + "]: expected the " + str(items[i].kv_begin) +
             " tokens of its planned prefix before its " + str(q_len) + " queries; got " +
             str(level.kv_lens[r]) + ". Call plan() again when a length falls below what is shared.";
  }
  return {};
}

int64_t page_of(const LevelParams& level, int32_t request, int64_t page) {
  const int64_t row = level.row_begin[request];
  return level.indices ? level.indices[row + page * level.index_step] / level.index_divisor : row + page;
}

// Whether the members of a node still have its pages.
std::string check_shared_pages(const AttentionParams& p, const PlanHeader& h) {
  const auto* nodes = reinterpret_cast<const PrefixNode*>(p.plan + p.layout.nodes);
  const auto* units = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units);
  const auto* tokens = reinterpret_cast<const int32_t*>(p.plan + p.layout.node_tokens);
  std::map<int32_t, int32_t> request_at;  // by first query token
  for (int32_t i = 0; i < h.num_units; ++i) {
    const int32_t r = units[i].request;
    if (units[i].token >= 0 && p.qo_indptr[r + 1] > p.qo_indptr[r]) request_at[units[i].token] = r;
  }
  for (int32_t i = 0; i < h.num_nodes; ++i) {
    const PrefixNode& n = nodes[i];
    for (int32_t k = n.tokens_begin; k < n.tokens_begin + n.num_tokens; ++k) {
      const auto at = request_at.find(tokens[k]);
      if (at == request_at.end()) continue;
      for (int64_t page = 0; page * p.level.page_size < n.kv_end; ++page)
        if (page_of(p.level, at->second, page) != page_of(p.level, n.request, page))
          return "page table: expected request " + str(at->second) + " to share its first " + str(n.kv_end) +
                 " tokens with request " + str(n.request) + ", as planned; got another page at position " +
                 str(page) + ". Plan with the forest of this page table.";
    }
  }
  return {};
}

// Besides what its own queries see, a request's row may be where a prefix node looks its pages up.
std::string check_page_ids(const AttentionParams& p, const PlanHeader& h) {
  const LevelParams& level = p.level;
  const auto* nodes = reinterpret_cast<const PrefixNode*>(p.plan + p.layout.nodes);
  thread_local std::vector<int32_t> node_end;
  node_end.assign(size_t(p.num_requests), 0);
  for (int32_t i = 0; i < h.num_nodes; ++i)
    node_end[size_t(nodes[i].request)] = std::max(node_end[size_t(nodes[i].request)], nodes[i].kv_end);
  for (int32_t r = 0; r < p.num_requests; ++r) {
    const int64_t q_len = int64_t(p.qo_indptr[r + 1]) - p.qo_indptr[r];
    const int32_t kv_len = level.kv_lens[r];
    int32_t begin = 0, end = node_end[size_t(r)];
    if (q_len > 0) {
      begin = end > 0 ? 0 : StandardVariant::visible_keys(p, int32_t(kv_len - q_len), kv_len).begin;
      end = std::max(end, StandardVariant::visible_keys(p, kv_len - 1, kv_len).end);
    }
    for (int64_t page = std::max(begin, 0) / level.page_size; page * level.page_size < end; ++page) {
      const int64_t entry = level.indices ? level.indices[level.row_begin[r] + page * level.index_step]
                                          : level.row_begin[r] + page;
      const int64_t id = entry / level.index_divisor;
      if (entry < 0 || id >= level.num_pages)
        return "page table: expected page ids in 0.." + str(level.num_pages - 1) + "; got " +
               str(entry < 0 ? entry : id) + " for request " + str(r) + " at page position " + str(page) +
               ", where the cache has num_pages = " + str(level.num_pages) + ".";
      const int64_t tokens = std::min<int64_t>(end - page * level.page_size, level.page_size);
      if (id == level.num_pages - 1 && tokens > level.last_page_size)
        return "page table: expected at most " + str(level.last_page_size) + " tokens in page " + str(id) +
               ", the last of the cache; got " + str(tokens) + " for request " + str(r) + ".";
    }
  }
  return {};
}

}  // namespace

std::string find_error(const AttentionParams& p, int64_t num_tokens, bool check_pages) {
  const auto& header = *reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header);
  const auto* bounds = reinterpret_cast<const int32_t*>(p.plan + p.layout.kv_len_bounds);
  std::string error = check_plan(p, header);
  if (error.empty()) error = check_lengths(p, header, bounds, num_tokens);
  if (error.empty()) error = check_coverage(p, header, bounds);
  if (error.empty()) error = check_nodes(p, header);
  if (error.empty() && check_pages) error = check_page_ids(p, header);
  if (error.empty() && check_pages) error = check_shared_pages(p, header);
  return error;
}

}  // namespace fi::cpu
