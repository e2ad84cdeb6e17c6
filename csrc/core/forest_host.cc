// SPDX-License-Identifier: Apache-2.0
#include "forest_host.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace fi {
namespace {

// Requests whose rows are equal up to and including page `begin`; ascending, in Finder::pool_.
struct Group {
  int32_t leader;
  int32_t parent;
  int32_t depth;  // of its first node
  int32_t begin;
  size_t first, count;
};

// What a member of a group has in common with the group's first one, the leader, and which page follows.
struct Entry {
  int32_t common;
  int32_t next;
  int32_t request;
};

class Finder {
 public:
  Finder(const PageRows& table, std::span<const int32_t> pages, int32_t page_size, int32_t max_depth,
         ForestNode* nodes, int32_t* members)
      : t_(table),
        pages_(pages),
        page_size_(page_size),
        max_depth_(max_depth),
        nodes_(nodes),
        members_(members) {}

  // The nodes along a leader's row come together; groups that leave it have later leaders, so that a heap
  // gives the order of all.
  ForestSize run() {
    entries_.clear();
    for (int32_t r = 0; r < int32_t(pages_.size()); ++r)
      if (pages_[size_t(r)] > 0) entries_.push_back({0, page(row(r), 0), r});
    push_groups([](int32_t) { return std::pair{-1, 0}; });
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), later_);
      const Group group = heap_.back();
      heap_.pop_back();
      expand(group);
    }
    return size_;
  }

 private:
  const int32_t* row(int32_t r) const { return t_.indices + t_.row_begin[r]; }
  int32_t page(const int32_t* row, int32_t p) const { return row[int64_t(p) * t_.step]; }

  // First page from `begin` on in which the rows differ, at most `end`.
  int32_t common_end(const int32_t* a, const int32_t* b, int32_t begin, int32_t end) const {
    if (t_.step > 1) {
      while (begin < end && page(a, begin) == page(b, begin)) ++begin;
      return begin;
    }
    constexpr int32_t kBlock = 64;
    for (; begin + kBlock <= end; begin += kBlock) {
      int32_t differ = 0;
      for (int32_t i = 0; i < kBlock; ++i) differ |= a[begin + i] ^ b[begin + i];
      if (differ) break;
    }
    while (begin < end && a[begin] == b[begin]) ++begin;
    return begin;
  }

  void expand(const Group& group) {
    const int32_t leader = group.leader;
    const int32_t* leader_row = row(leader);
    entries_.clear();
    ends_.clear();
    for (size_t i = 1; i < group.count; ++i) {
      const int32_t r = pool_[group.first + i];
      const int32_t* own = row(r);
      const int32_t limit = std::min(pages_[size_t(r)], pages_[size_t(leader)]);
      const int32_t common = common_end(leader_row, own, group.begin + 1, limit);
      entries_.push_back({common, pages_[size_t(r)] > common ? page(own, common) : 0, r});
      ends_.push_back(common);
    }
    std::sort(ends_.begin(), ends_.end());
    ends_.erase(std::unique(ends_.begin(), ends_.end()), ends_.end());
    if (ends_.size() > size_t(max_depth_ - group.depth)) ends_.resize(size_t(max_depth_ - group.depth));

    const int32_t first_node = size_.nodes;
    int32_t begin = group.begin;
    for (const int32_t end : ends_) {
      const int32_t parent = end == ends_.front() ? group.parent : size_.nodes - 1;
      const int32_t first = size_.members;
      members_[size_.members++] = leader;
      for (const Entry& e : entries_)
        if (e.common >= end) members_[size_.members++] = e.request;
      nodes_[size_.nodes++] = {parent, begin * page_size_, end * page_size_, first, size_.members};
      begin = end;
    }

    std::erase_if(entries_, [&](const Entry& e) { return pages_[size_t(e.request)] == e.common; });
    push_groups([&](int32_t end) {
      const auto found = std::lower_bound(ends_.begin(), ends_.end(), end);
      const auto index = int32_t(found - ends_.begin());
      return found == ends_.end() ? std::pair{-1, max_depth_}
                                  : std::pair{first_node + index, group.depth + index + 1};
    });
  }

  // Pushes the groups of entries_ with equal (common, next). `place`: common pages to the parent node and the
  // depth below it.
  template <class F>
  void push_groups(F place) {
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.common, a.next, a.request) < std::tie(b.common, b.next, b.request);
    });
    for (size_t i = 0, end; i < entries_.size(); i = end) {
      const Entry& e = entries_[i];
      for (end = i + 1;
           end < entries_.size() && entries_[end].common == e.common && entries_[end].next == e.next;)
        ++end;
      const auto [parent, depth] = place(e.common);
      if (end - i < 2 || depth >= max_depth_) continue;
      heap_.push_back({e.request, parent, depth, e.common, pool_.size(), end - i});
      std::push_heap(heap_.begin(), heap_.end(), later_);
      for (; i < end; ++i) pool_.push_back(entries_[i].request);
    }
  }

  static constexpr auto later_ = [](const Group& a, const Group& b) { return a.leader > b.leader; };

  const PageRows& t_;
  const std::span<const int32_t> pages_;
  const int32_t page_size_, max_depth_;
  ForestNode* const nodes_;
  int32_t* const members_;
  ForestSize size_{};
  std::vector<Group> heap_;
  std::vector<int32_t> pool_, ends_;
  std::vector<Entry> entries_;
};

}  // namespace

ForestSize find_forest(const PageRows& table, std::span<const int32_t> pages, int32_t page_size,
                       int32_t max_depth, ForestNode* nodes, int32_t* members) {
  return Finder(table, pages, page_size, max_depth, nodes, members).run();
}

}  // namespace fi
