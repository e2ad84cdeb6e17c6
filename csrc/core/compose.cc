// SPDX-License-Identifier: Apache-2.0
#include "compose.h"

#include <stdexcept>
#include <string>

#include "compose_rules.h"

namespace fi {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

[[noreturn]] void fail(size_t node, const char* field, const std::string& text) {
  throw std::invalid_argument("forest.nodes[" + str(int64_t(node)) + "]: " + field + ": expected " + text +
                              ". Build it with PrefixForest for the lengths of this step.");
}

void check_place(std::span<const ForestNode> nodes, size_t i, int32_t page_size) {
  const ForestNode& n = nodes[i];
  if (n.parent < -1 || n.parent >= int32_t(i)) fail(i, "parent", "-1 or a node before; got " + str(n.parent));
  const int32_t begin = n.parent < 0 ? 0 : nodes[size_t(n.parent)].end;
  if (n.begin != begin) fail(i, "begin", str(begin) + ", where the node above ends; got " + str(n.begin));
  if (n.end <= n.begin || n.end % page_size != 0)
    fail(i, "end",
         "a multiple of the page size " + str(page_size) + " above " + str(n.begin) + "; got " + str(n.end));
}

struct Scratch {
  std::vector<int32_t> deepest;     // by request: the last node that it was a member of
  std::vector<int64_t> below;       // by forest node, see compose_rules.h
  std::vector<int64_t> saved;       // what the nodes below took off
  std::vector<int32_t> tokens;      // query tokens of the members
  std::vector<int32_t> start;       // where the node's keys begin if it is kept
  std::vector<int32_t> kept_above;  // nodes kept on the way to it
  std::vector<int32_t> kept;        // the composition's node that is or lies above this one, or -1
};

thread_local Scratch scratch;

}  // namespace

void check_forest(const PlannerConfig& config, std::span<const int32_t> qo_indptr,
                  std::span<const int32_t> kv_lens, const Forest& forest) {
  const int32_t requests = int32_t(kv_lens.size());
  std::vector<int32_t>& deepest = scratch.deepest;
  deepest.assign(kv_lens.size(), -1);
  for (size_t i = 0; i < forest.nodes.size(); ++i) {
    const ForestNode& n = forest.nodes[i];
    check_place(forest.nodes, i, forest.page_size);
    if (n.member_begin < 0 || n.member_end > int64_t(forest.members.size()) ||
        int64_t(n.member_end) - n.member_begin < 2)
      fail(i, "member_begin, member_end",
           "two or more of the " + str(int64_t(forest.members.size())) + " members; got " +
               str(n.member_begin) + ", " + str(n.member_end));
    for (int32_t k = n.member_begin; k < n.member_end; ++k) {
      const int32_t r = forest.members[size_t(k)];
      if (r < 0 || r >= requests)
        fail(i, "members", "requests 0 .. " + str(requests - 1) + "; got " + str(r));
      if (k > n.member_begin && r <= forest.members[size_t(k) - 1])
        fail(i, "members",
             "ascending requests; got " + str(r) + " after " + str(forest.members[size_t(k) - 1]));
      if (deepest[size_t(r)] != n.parent)
        fail(i, "members", "members of the node above that are in no other node beside it; got " + str(r));
      deepest[size_t(r)] = int32_t(i);
      const int32_t most = shareable_tokens(config, qo_indptr[size_t(r) + 1] - qo_indptr[size_t(r)],
                                            kv_lens[size_t(r)], forest.page_size);
      if (n.end > most)
        fail(i, "end",
             "at most the " + str(most) + " tokens that request " + str(r) +
                 " may share, whole pages before its queries, or 0 where these need more than one tile of " +
                 str(config.max_tile) + " rows; got " + str(n.end));
    }
  }
}

void compose(const PlannerConfig& config, std::span<const int32_t> qo_indptr, const Forest& forest,
             Composition& composition) {
  composition.clear();
  if (config.sharing.max_nodes == 0 || config.window_left >= 0 || config.invariant_grid > 0) return;
  Scratch& s = scratch;
  const size_t count = forest.nodes.size();
  s.below.assign(count, 0);
  s.saved.assign(count, 0);
  s.tokens.assign(count, 0);
  s.start.resize(count);
  s.kept_above.resize(count);
  s.kept.resize(count);

  const auto key_cost = [&](size_t i) { return node_key_cost(config, s.tokens[i]); };
  const auto overhead = [&](size_t i) {
    return node_overhead(config, s.tokens[i], forest.nodes[i].member_end - forest.nodes[i].member_begin);
  };
  for (size_t i = count; i-- > 0;) {
    const ForestNode& n = forest.nodes[i];
    for (int32_t k = n.member_begin; k < n.member_end; ++k) {
      const size_t r = size_t(forest.members[size_t(k)]);
      const int32_t q_len = qo_indptr[r + 1] - qo_indptr[r];
      s.tokens[i] += q_len;
      s.below[i] += member_key_cost(config, q_len);
    }
    s.below[i] -= s.saved[i];
    if (n.parent < 0) continue;
    const bool keep = pays(n.end - n.begin, s.below[i], key_cost(i), overhead(i));
    s.saved[size_t(n.parent)] += keep ? s.saved[i] + s.below[i] - key_cost(i) : s.saved[i];
  }

  int64_t kept = 0, tokens = 0;
  for (size_t i = 0; i < count; ++i) {
    const ForestNode& n = forest.nodes[i];
    const bool root = n.parent < 0;
    const size_t parent = root ? 0 : size_t(n.parent);
    const int32_t above = root ? -1 : s.kept[parent];
    s.start[i] = above < 0 ? 0 : composition.nodes[size_t(above)].end;
    s.kept_above[i] = root ? 0 : s.kept_above[parent];
    s.kept[i] = above;
    if (s.kept_above[i] >= config.sharing.max_levels) continue;
    if (!pays(n.end - s.start[i], s.below[i], key_cost(i), overhead(i))) continue;
    ++kept;
    if (above < 0) tokens += s.tokens[i];
    if (!within_limits(config, kept, tokens)) break;  // and so is every later one
    ++s.kept_above[i];
    s.kept[i] = int32_t(composition.nodes.size());
    composition.nodes.push_back({above, s.start[i], n.end, n.member_begin, n.member_end, s.tokens[i],
                                 node_kind(config, s.tokens[i]), node_tile_count(config, s.tokens[i])});
  }
  if (composition.empty()) return;
  composition.leaf.assign(qo_indptr.size() - 1, -1);
  for (size_t j = 0; j < composition.nodes.size(); ++j)
    for (int32_t k = composition.nodes[j].member_begin; k < composition.nodes[j].member_end; ++k)
      composition.leaf[size_t(forest.members[size_t(k)])] = int32_t(j);
}

}  // namespace fi
