// SPDX-License-Identifier: Apache-2.0
// What the exact range of a work item follows from, gathered by a warp: every lane brings a word.
#pragma once
#include "../core/params.h"
#include "ptx/grids.cuh"

namespace fi::sm80 {

struct ItemInputs {
  WorkItem item;
  MergeUnit unit;            // of an item that reports to one
  int32_t qo_begin, qo_end;  // query tokens of its request
  int32_t kv_len;
  int32_t unused;
  int64_t row_begin, row_end;
};
static_assert(sizeof(ItemInputs) == 96 && sizeof(PlanHeader) == 32 * 4);

// Word `lane` of the plan's header. Not through L1, which would keep it beyond the end of the grids before.
__device__ __forceinline__ int32_t header_word(const AttentionParams& p, int lane) {
  return __ldcg(reinterpret_cast<const int32_t*>(p.plan + p.layout.header) + lane);
}

// A lane's word of an item: of the item itself, of its merge unit, of its request. 0 where it has none.
__device__ __forceinline__ int32_t input_word(const AttentionParams& p, int lane, int index, int unit,
                                              int request) {
  const LevelParams& level = p.level;
  const bool is_item = lane < 8, is_unit = !is_item && lane < 16;
  const char* from = reinterpret_cast<const char*>(p.plan) + (is_item ? p.layout.items : p.layout.units);
  int row = is_item ? index : unit, stride = 32, word = lane % 8;
  if (lane >= 16) {
    from = reinterpret_cast<const char*>(lane < 18   ? static_cast<const void*>(p.qo_indptr)
                                         : lane < 20 ? static_cast<const void*>(level.kv_lens)
                                         : lane < 22 ? static_cast<const void*>(level.row_begin)
                                                     : static_cast<const void*>(level.row_end));
    row = request, stride = lane < 20 ? 4 : 8, word = lane % 2;
  }
  const bool has = lane < 24 && lane != 19 && row >= 0;
  return has ? __ldcg(reinterpret_cast<const int32_t*>(from + int64_t(row) * stride) + word) : 0;
}

// Gathers the words of item `index`, those of its request not where it is a prefix node's. Returns whether
// all lie inside of their arrays, whatever the plan says; none is read of those that do not.
__device__ __forceinline__ bool gather(const AttentionParams& p, int lane, int index, ItemInputs& inputs) {
  if (index < 0 || int64_t(index + 1) * int64_t(sizeof(WorkItem)) > p.layout.units - p.layout.items)
    return false;
  int32_t word = input_word(p, lane < 8 ? lane : 31, index, -1, -1);
  const int request = __shfl_sync(~0u, word, 1), unit = __shfl_sync(~0u, word, 6);
  const bool node = __shfl_sync(~0u, word, 0) & kPrefix;
  const bool inside = uint32_t(request) < uint32_t(p.num_requests) &&
                      int64_t(unit + 1) * int64_t(sizeof(MergeUnit)) <= p.layout.parts - p.layout.units;
  if (!node && inside && lane >= 8) word = input_word(p, lane, index, unit, request);
  if (lane < int(sizeof(ItemInputs) / 4)) reinterpret_cast<int32_t*>(&inputs)[lane] = word;
  __syncwarp();
  return node || inside;
}

// Whether the item that was gathered last, no node's, has the same words now.
__device__ __forceinline__ bool is_same(const AttentionParams& p, int lane, int index,
                                        const ItemInputs& inputs) {
  const int32_t word = input_word(p, lane, index, inputs.item.unit, inputs.item.request);
  return lane >= 24 || word == reinterpret_cast<const int32_t*>(&inputs)[lane];
}

// Barriers are made, and the grids before this one are through.
__device__ __forceinline__ void begin_launch() {
  __syncthreads();
#if FI_PDL
  ptx::wait_for_grids();
#endif
}

}  // namespace fi::sm80
