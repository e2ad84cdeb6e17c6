// SPDX-License-Identifier: Apache-2.0
// Where the keys and values of a tile lie.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../core/variant.h"
#include "microkernels.h"

namespace fi::cpu {

// Row pointers of the keys [begin, end) of a tile.
template <class KV>
struct Tokens {
  int begin = 0, end = 0;
  const KV* k[kKeyTile];
  const KV* v[kKeyTile];
};

// Tokens that the pages of a request's row hold.
inline int64_t row_capacity(const LevelParams& level, int32_t request) {
  const int64_t entries = level.row_end[request] - level.row_begin[request];
  return (entries + level.index_step - 1) / level.index_step * level.page_size;
}

// Whether the cache has the tokens [offset, offset + count) of the page that an entry of the table names.
inline bool has_tokens(const LevelParams& level, int64_t entry, int64_t page, int32_t offset, int count) {
  const int64_t last = level.num_pages - 1;
  return entry >= 0 && (page < last || (page == last && offset + count <= level.last_page_size));
}

// The keys [tile + range.begin, tile + range.end) of a request and KV head; no other page is looked up. For
// tokens that the cache does not have, the first one of all is read, and a fault says so.
template <class KV>
void locate_tokens(const AttentionParams& p, int32_t request, int32_t kv_head, int32_t tile, KeyRange range,
                   Tokens<KV>& tokens) {
  const LevelParams& level = p.level;
  const int64_t row = level.row_begin[request];
  int32_t page = (tile + range.begin) / level.page_size;
  int32_t offset = (tile + range.begin) % level.page_size;
  const auto* k_head = static_cast<const KV*>(p.k) + kv_head * p.k_stride_head;
  const auto* v_head = static_cast<const KV*>(p.v) + kv_head * p.v_stride_head;
  tokens.begin = range.begin;
  tokens.end = range.end;
  for (int i = range.begin; i < range.end; ++page, offset = 0) {
    const int64_t entry = level.indices ? level.indices[row + int64_t(page) * level.index_step] : row + page;
    const int64_t id = level.indices ? entry / level.index_divisor : entry;
    const int stop = i + std::min(range.end - i, level.page_size - offset);
    if (!has_tokens(level, entry, id, offset, stop - i)) [[unlikely]] {
      std::atomic_ref(p.counters[kFaults]).fetch_or(kFaultPages, std::memory_order_relaxed);
      for (; i < stop; ++i) {
        tokens.k[i] = k_head;
        tokens.v[i] = v_head;
      }
      continue;
    }
    const KV* key = k_head + id * p.k_stride_page + offset * p.k_stride_token;
    const KV* value = v_head + id * p.v_stride_page + offset * p.v_stride_token;
    for (; i < stop; ++i, key += p.k_stride_token, value += p.v_stride_token) {
      tokens.k[i] = key;
      tokens.v[i] = value;
    }
  }
}

}  // namespace fi::cpu
