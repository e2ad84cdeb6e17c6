// SPDX-License-Identifier: Apache-2.0
#include "emit.h"

#include "compose_rules.h"

namespace fi {
namespace {

thread_local std::vector<int32_t> unit_of;  // by request, set for members

class Emitter {
 public:
  Emitter(const PlannerConfig& config, std::span<const int32_t> qo_indptr, const CutTiles& cut,
          std::vector<WorkItem>& items, const PlanSections& to)
      : c_(config), starts_(qo_indptr), cut_(cut), items_(items), to_(to) {}

  void add_requests(const Composition& composition) {
    for (; at_ < cut_.tiles.size() && cut_.tiles[at_].level != kNode; ++at_) {
      const Tile& t = cut_.tiles[at_];
      const Split& s = cut_.splits[at_];
      for (int32_t c = 0; c < s.chunks; ++c) items_.push_back(make_item(c_, t, s, c, unit_, row_));
      if (s.states == 0) continue;
      const int32_t first_part = part_;
      int32_t token = -1;
      if (t.level == kOwn) {
        token = starts_[size_t(t.request)];
        unit_of[size_t(t.request)] = unit_;
        part_ += cut_.path_chunks[size_t(composition.leaf[size_t(t.request)])];  // add_node() fills them in
      }
      for (uint32_t state = 0; state < s.states; ++state, row_ += t.q_rows) to_.parts[part_++] = row_;
      to_.units[unit_++] = {t.request, t.q_begin, t.q_rows, s.chunks, first_part, part_, token, 0};
    }
  }

  void add_node(int32_t index, const KeptNode& node, std::span<const int32_t> members) {
    const int32_t rows = node.tokens * c_.group, first_row = row_, first_token = counts_.tokens;
    const Split& s = cut_.splits[at_];  // that of all its tiles
    int32_t offset = 0;
    for (int32_t r : members) {
      const int32_t first = starts_[size_t(r)], last = starts_[size_t(r) + 1];
      for (int32_t token = first; token < last; ++token) to_.node_tokens[counts_.tokens++] = token;
      const int32_t q_rows = (last - first) * c_.group;
      const TileRange tiles = member_tiles(node.kind, offset, q_rows);
      MergeUnit& unit = to_.units[unit_of[size_t(r)]];
      unit.num_items += s.chunks * (tiles.last - tiles.first + 1);
      int32_t* parts = to_.parts + unit.parts_begin + cut_.path_chunks[size_t(index)] - s.chunks;
      for (int32_t c = 0; c < s.chunks; ++c) parts[c] = first_row + c * rows + offset;
      offset += q_rows;
    }
    to_.nodes[index] = {members[0], first_token, node.tokens, node.end};

    size_t begins = 0;  // the first member with rows in this tile or behind
    int32_t begins_at = 0;
    for (int32_t k = 0; k < node.num_tiles; ++k, ++at_) {
      const Tile& t = cut_.tiles[at_];
      for (int32_t c = 0; c < s.chunks; ++c)
        items_.push_back(make_item(c_, t, s, c, counts_.reports, first_row + t.q_begin, rows));
      row_ += s.chunks * t.q_rows;
      int32_t& length = to_.reports[counts_.reports++];
      length = 0;
      int32_t at = begins_at;
      for (size_t m = begins; m < members.size() && at < t.q_begin + t.q_rows; ++m) {
        const size_t r = size_t(members[m]);
        at += (starts_[r + 1] - starts_[r]) * c_.group;
        to_.reports[counts_.reports++] = unit_of[r];
        ++length;
        if (at > t.q_begin + t.q_rows) break;  // the next tile has rows of it, too
        begins = m + 1;
        begins_at = at;
      }
    }
  }

  NodeCounts counts() const { return counts_; }

 private:
  const PlannerConfig& c_;
  const std::span<const int32_t> starts_;
  const CutTiles& cut_;
  std::vector<WorkItem>& items_;
  const PlanSections& to_;
  size_t at_ = 0;
  int32_t unit_ = 0, part_ = 0, row_ = 0;
  NodeCounts counts_{};
};

}  // namespace

NodeCounts emit(const PlannerConfig& config, std::span<const int32_t> qo_indptr, const Forest& forest,
                const Composition& composition, const CutTiles& cut, std::vector<WorkItem>& items,
                const PlanSections& to) {
  items.clear();
  if (!composition.empty()) unit_of.resize(qo_indptr.size() - 1);
  Emitter emitter(config, qo_indptr, cut, items, to);
  emitter.add_requests(composition);
  for (size_t j = 0; j < composition.nodes.size(); ++j) {
    const KeptNode& n = composition.nodes[j];
    emitter.add_node(int32_t(j), n,
                     forest.members.subspan(size_t(n.member_begin), size_t(n.member_end - n.member_begin)));
  }
  return emitter.counts();
}

}  // namespace fi
