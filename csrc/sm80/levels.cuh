// SPDX-License-Identifier: Apache-2.0
// How the levels of composed requests join. An item of a prefix node reports to the merge units of all its
// rows, and may be the last one of many: all units that it completes are folded together.
#pragma once
#include "epilogue.cuh"

namespace fi::sm80 {

// Rows of the units that one item can complete: those of its tile, and what the units at both ends of the
// tile have outside of it.
inline constexpr int kCompletedRows = 3 * kMaxQueryTile;

// The rows to be folded, in shared memory where no warp keeps queries or states any more.
struct CompletedRows {
  // Of a completed unit: its first query token, its first packed row, and where its parts begin and end.
  int4 units[kMaxQueryTile];
  uint16_t rows[kCompletedRows];  // index into units, and packed row of the unit

  static constexpr int request = 0, first_pos = 0;  // of many: nothing depends on them

  __device__ __forceinline__ int4 unit(int at) const { return units[rows[at] / kMaxQueryTile]; }
  __device__ __forceinline__ int row(int at) const { return rows[at] % kMaxQueryTile; }
};

// The rows of one unit.
struct RowsOfUnit {
  int4 only;
  int request, first_pos;

  __device__ __forceinline__ explicit RowsOfUnit(const Work& w)
      : only(make_int4(w.token_begin, w.q_begin, w.parts_begin, w.parts_end)),
        request(w.request),
        first_pos(w.first_pos) {}

  __device__ __forceinline__ int4 unit(int) const { return only; }
  __device__ __forceinline__ int row(int at) const { return at; }
};

// One warp's look at the units to which an item reports: lane l has units l, l + 32, ...
struct ReportedUnits {
  static constexpr int kUnits = kMaxQueryTile / 32;
  int32_t* counter[kUnits];  // null: no unit
  int32_t last[kUnits];      // what the counter says to the last item of the unit
  int32_t rows[kUnits];
  int4 unit[kUnits];

  __device__ __forceinline__ ReportedUnits(const AttentionParams& p, const Work& w, int lane) {
    int32_t* counters = p.counters + kArrivals + w.kv_head;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      counter[i] = nullptr;
      last[i] = rows[i] = 0;
      unit[i] = make_int4(0, 0, 0, 0);
    }
    if (w.tokens < 0) {
      if (lane > 0) return;
      counter[0] = counters + w.unit * p.num_kv_heads;
      last[0] = w.num_items - 1;
      rows[0] = w.q_rows;
      unit[0] = make_int4(w.token_begin, w.q_begin, w.parts_begin, w.parts_end);
      return;
    }
    const auto* list = reinterpret_cast<const int32_t*>(p.plan + p.layout.reports) + w.unit;
    const int count = __ldg(list);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i * 32 + lane >= count) continue;
      const int index = __ldg(list + 1 + i * 32 + lane);
      const MergeUnit found = reinterpret_cast<const MergeUnit*>(p.plan + p.layout.units)[index];
      const QueryTokens tokens = query_tokens(p, found.request);
      counter[i] = counters + index * p.num_kv_heads;
      last[i] = found.num_items - 1;
      rows[i] = min(found.q_rows, tokens.count * p.group - found.q_begin);
      unit[i] = make_int4(tokens.begin, found.q_begin, found.parts_begin, found.parts_end);
    }
  }

  // Reports to all units, lists the rows of those that are complete now, and returns how many rows these are.
  __device__ __forceinline__ int report(CompletedRows& completed, int lane) {
    int32_t before[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) before[i] = counter[i] ? atomicAdd(counter[i], 1) : 0;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!counter[i] || before[i] != last[i]) {
        rows[i] = 0;
        continue;
      }
      *counter[i] = 0;
      completed.units[i * 32 + lane] = unit[i];
      mine += rows[i] = max(rows[i], 0);
    }
    int end = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    int at = end - mine;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
#pragma unroll 1
      for (int row = 0; row < rows[i]; ++row)
        completed.rows[at++] = uint16_t((i * 32 + lane) * kMaxQueryTile + row);
    return __shfl_sync(~0u, end, 31);
  }
};

// Folds the listed rows, kRows of a slot at a time and kBatches batches of parts of each, so that many reads
// are under way. A row's bits depend on neither, nor on its neighbours.
template <class Traits, int kRows, int kBatches, class Rows>
__device__ __forceinline__ void fold_rows(const AttentionParams& p, const LaunchConstants& c,
                                          const Rows& completed, int total, int kv_head, int tid,
                                          int threads) {
  using Slots = MergeSlots<Traits>;
  constexpr int kParts = kBatches * kLevelBatch;
  const int lane = tid % Slots::kLanes, slot = tid / Slots::kLanes, slots = threads / Slots::kLanes;
  const auto* parts = reinterpret_cast<const int32_t*>(p.plan + p.layout.parts);
#pragma unroll 1
  for (int first = slot; first < total; first += kRows * slots) {
    int row[kRows], begin[kRows], end[kRows], longest = 0;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int at = min(first + j * slots, total - 1);
      const int4 unit = completed.unit(at);
      row[j] = completed.row(at);
      begin[j] = unit.z;
      end[j] = first + j * slots < total ? unit.w : unit.z;
      longest = max(longest, end[j] - begin[j]);
    }
#pragma unroll 1
    for (int vector = lane; vector < Slots::kVectors; vector += Slots::kLanes) {
      Accumulator sum[kRows];
#pragma unroll 1
      for (int at = 0; at < longest; at += kParts) {
        float lse[kRows][kParts];
        float4 o[kRows][kParts];
#pragma unroll
        for (int j = 0; j < kRows; ++j)
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const int part = begin[j] + at + i;
            // Without a value a register would stay taken from one item to the next.
            lse[j][i] = -INFINITY;
            o[j][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (part < end[j])
              load_part<Traits>(p, parts[part] + row[j], kv_head, vector, lse[j][i], o[j][i]);
          }
#pragma unroll
        for (int j = 0; j < kRows; ++j)
#pragma unroll
          for (int batch = 0; batch < kParts; batch += kLevelBatch)
            add_batch(sum[j], lse[j] + batch, o[j] + batch);
      }
      // One after another: their code is long and their stores wait for nothing.
#pragma unroll 1
      for (int at = first; at < min(total, first + kRows * slots); at += slots) {
        const int4 unit = completed.unit(at);
        const int packed = unit.y + completed.row(at);
        store_sum<Traits>(p, c, sum[0], unit.x, packed, kv_head, vector, completed.request,
                          completed.first_pos);
#pragma unroll
        for (int j = 1; j < kRows; ++j) sum[j - 1] = sum[j];
      }
    }
  }
}

// arrive() of an item whose rows belong to composed requests.
template <class Traits>
__device__ __forceinline__ void arrive_at_levels(const AttentionParams& p, const LaunchConstants& c,
                                                 Control& control, const Work& w, int tid, char* shared) {
  static_assert(sizeof(CompletedRows) <= Traits::kQBytes);
  auto& completed = *reinterpret_cast<CompletedRows*>(shared);
  const int kv_head = w.kv_head;
  if (tid < 32) {
    ReportedUnits units(p, w, tid);  // read while the other warps are still storing
    __threadfence();
    ptx::named_barrier(1, kConsumers);
    const int rows = units.report(completed, tid);
    if (tid == 0) control.arrived = rows;
  } else {
    __threadfence();
    ptx::named_barrier(1, kConsumers);
  }
  ptx::named_barrier(1, kConsumers);
  const int total = *static_cast<volatile int32_t*>(&control.arrived);
  if (total == 0) return;
  __threadfence();
  if (total <= MergeSlots<Traits>::kCount)
    fold_rows<Traits, 1, 4>(p, c, completed, total, kv_head, tid, kConsumers);
  else
    fold_rows<Traits, 4, 1>(p, c, completed, total, kv_head, tid, kConsumers);
  ptx::named_barrier(1, kConsumers);  // the list has been read
}

// arrive() of one head of a bundle, by the warps of its place.
template <class Traits>
__device__ __forceinline__ void arrive_in_bundle(const Consumer<Traits>& x, Control& control) {
  if constexpr (kComposes<Traits>) {
    const AttentionParams& p = x.p;
    const Work& w = x.w;
    const int threads = x.members * 32, thread = x.member * 32 + x.lane, kv_head = x.kv_head();
    const auto sync = [&] {
      if (threads == 32)
        __syncwarp();
      else
        ptx::named_barrier(1 + (Traits::kMaxGroups >> x.members_log2) + x.place(), threads);
    };
    __threadfence();
    sync();
    int32_t* counter = p.counters + kArrivals + w.unit * p.num_kv_heads + kv_head;
    if (thread == 0) control.place_arrived[x.warp] = atomicAdd(counter, 1) == w.num_items - 1;
    sync();
    const bool last = *static_cast<volatile int32_t*>(&control.place_arrived[x.warp - x.member]);
    sync();  // its first warp may write there again
    if (!last) return;
    __threadfence();
    if (thread == 0) *counter = 0;
    if (w.q_rows > 0) fold_rows<Traits, 4, 1>(p, x.c, RowsOfUnit(w), w.q_rows, kv_head, thread, threads);
  }
}

}  // namespace fi::sm80
