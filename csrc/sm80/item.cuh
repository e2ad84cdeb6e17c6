// SPDX-License-Identifier: Apache-2.0
// The consumers' walk through items: their tiles of the ring, then the result.
#pragma once
#include "../sm90/widened.cuh"
#include "attend.cuh"
#include "grid_state.cuh"
#include "levels.cuh"
#include "merge.cuh"
#include "shared_rows.cuh"

namespace fi::sm80 {

// Result of a warp that saw all keys of its rows.
template <class Traits>
__device__ __forceinline__ void store(Consumer<Traits>& x) {
  float lse[2], factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    x.state.finish(r, lse[r], factor[r]);
    if (x.w.faults) lse[r] = quiet_nan();
  }
  if (x.w.partial < 0)
    store_final(x, lse, factor);
  else
    store_partial(x, x.w.partial, lse, factor);
}

// A tile of 128 rows that its warps see in another way than narrower ones. Never finishes its unit.
template <class View, class Products>
__device__ __forceinline__ bool run_tallest(const AttentionParams& p, const LaunchConstants& c,
                                            Control& control, const Work& w, int tid, char* shared,
                                            uint32_t stages, const Ring<View::kStages>& stage, int tiles) {
  Consumer<View> x(p, c, w, tid, shared);
  Products::attend(x, control, stages, stage, tiles);
  if (tid == 0 && w.faults) atomicOr(p.counters + kFaults, w.faults);
  store(x);
  if constexpr (kWideHeads<View>) x.sync_columns();  // narrower tiles share the slices in another way
  return false;
}

// Returns whether the item's unit is finished without its arrival.
template <class Traits>
__device__ __forceinline__ bool run_item(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                         const Work& w, int tid, char* shared, uint32_t stages,
                                         const Ring<Traits::kStages>& stage, int tiles) {
  static_assert(!(Traits::kWgmma && kTransformsTiles), "wgmma reads tiles as they lie in shared memory");
  static_assert(!Traits::kWgmma || Traits::kReadsQueries || Traits::kColumnWarps == 1,
                "a warp holds whole rows");
  static_assert(!Traits::kReadsQueries || Traits::kHeadDimV <= Traits::kHeadDim,
                "results leave through the queries' place");
  const bool tallest = 1 << w.tile_log2 == kMaxQueryTile;
  if constexpr (Traits::kReadsQueries) {
    using View = WideHeads<Traits>;
    if (tallest)
      return run_tallest<View, sm90::Wide<View>>(p, c, control, w, tid, shared, stages, stage, tiles);
  }
  if constexpr (Traits::kWidens) {
    using View = WidenedTiles<Traits>;
    if (tallest)
      return run_tallest<View, sm90::Widened<View>>(p, c, control, w, tid, shared, stages, stage, tiles);
  }
  Consumer<Traits> x(p, c, w, tid, shared);
  Ring<Traits::kStages> first = stage;
  if (kRingQueries<Traits> && w.query_tiles) {
    x.take_queries(control, stages, first);
    first.advance();
  }
  if constexpr (Traits::kWgmma && !Traits::kReadsQueries && !Traits::kWidens) {
    if (x.members == 1 && !x.in_bundle()) {
      FI_MARK(control, "queries");
      sm90::Wide<Traits>::attend(x, control, stages, first, tiles);
      FI_MARK(control, "attended");
      if (tid == 0 && w.faults) atomicOr(p.counters + kFaults, w.faults);
      store(x);
      return false;
    }
  }
  FI_MARK(control, "queries");
  if (has_few_rows<Traits>(w)) {
    attend<Traits, kFewRows<Traits> ? 1 : 2>(x, control, stages, first, tiles, [](int) {});
    x.join_halves();
  } else {
    attend<Traits>(x, control, stages, first, tiles, [](int) {});
  }
  FI_MARK(control, "attended");
  if (tid == 0 && w.faults) atomicOr(p.counters + kFaults, w.faults);
  if (x.in_bundle()) {
    if (!combine(x, control, shared) && w.unit >= 0) arrive_in_bundle(x, control);
    return true;
  }
  if (x.members > 1) return combine(x, control, shared);
  store(x);
  return false;
}

// The rows of one warp, which takes all tiles of its row group in their order.
template <class Traits>
struct OwnRows {
  static constexpr int kColumns = Consumer<Traits>::kColumns;
  static constexpr bool kInSlice = Traits::kQInRegisters && Traits::kColumnWarps == 1;
  static_assert(!kInSlice || kColumns * 32 * 16 <= Traits::kSliceBytes);

  Consumer<Traits>& x;
  std::conditional_t<kInSlice, GridSlice<kColumns>, GridState<kColumns>> grid;

  // Leaves the grid's columns without a value, or they would take registers before the first border.
  __device__ __forceinline__ explicit OwnRows(Consumer<Traits>& x_)
    requires(kInSlice)
      : x(x_), grid(x.slice, x.lane) {}
  __device__ __forceinline__ explicit OwnRows(Consumer<Traits>& x_) : x(x_) {}

  __device__ __forceinline__ void clear() { x.clear(); }
  __device__ __forceinline__ void fold() {
    grid.fold(x.state, x.out);
    x.clear();
  }
  __device__ __forceinline__ void finish(float (&lse)[2]) { grid.finish(x.state, x.out, lse); }
  __device__ __forceinline__ void store_partial(int row, const float (&lse)[2], const float (&factor)[2]) {
    sm80::store_partial(x, row, lse, factor);
  }
  __device__ __forceinline__ void store_final(float (&lse)[2], float (&factor)[2]) {
    sm80::store_final(x, lse, factor);
  }
};

// Where the grid chunks of an item end, behind its first key.
template <class Rows>
struct GridChunks {
  Rows& rows;
  const int grid;
  int border, partial;

  __device__ __forceinline__ GridChunks(const AttentionParams& p, Rows& rows_)
      : rows(rows_), grid(reinterpret_cast<const PlanHeader*>(p.plan + p.layout.header)->invariant_grid) {
    const Work& w = rows.x.w;
    border = (w.kv_begin / grid + 1) * grid;
    partial = w.partial;
  }

  // Whether the tile that begins at `key` is another chunk's than the one before. Asked once a tile.
  __device__ __forceinline__ bool begins(int key) {
    if (key != border) return false;
    border += grid;
    return true;
  }

  __device__ __forceinline__ void end() { end_chunk(rows, partial); }
  // The same where the state of the next chunk has begun already.
  __device__ __forceinline__ void end(const RowState& ended) {
    const RowState begun = rows.x.state;
    rows.x.state = ended;
    end();
    rows.x.state = begun;
  }
};

// The batch-invariant mode: states end at fixed key positions, and every element is one chain of products,
// whatever the height of the tile. wgmma and mma.sync give the same bits, which was measured on an H200.
template <class Traits>
__device__ __forceinline__ void run_invariant_item(const AttentionParams& p, const LaunchConstants& c,
                                                   Control& control, const Work& w, int tid, char* shared,
                                                   uint32_t stages, Ring<Traits::kStages> stage, int tiles) {
  Consumer<Traits> x(p, c, w, tid, shared);
  if (kRingQueries<Traits> && w.query_tiles) {
    x.take_queries(control, stages, stage);
    stage.advance();
  }
  if constexpr (kSharesRows<Traits>) {
    if (row_groups(w) == 1) {
      SharedRows<Traits> rows(x, shared);
      GridChunks chunks(p, rows);
      rows.attend(control, stages, stage, tiles, chunks);
      if (tid == 0 && w.faults) atomicOr(p.counters + kFaults, w.faults);
      end_item(rows, chunks.partial);
      return;
    }
  }
  if (x.member > 0) return;
  OwnRows<Traits> rows(x);
  GridChunks chunks(p, rows);
  if constexpr (Traits::kWgmma) {
    if (x.members == 1) {
      sm90::Wide<Traits>::attend(x, control, stages, stage, tiles, chunks);
      if (tid == 0 && w.faults) atomicOr(p.counters + kFaults, w.faults);
      end_item(rows, chunks.partial);
      return;
    }
  }
  attend<Traits>(x, control, stages, stage, tiles, [&](int i) {
    if (chunks.begins(w.kv_begin + i * Traits::kKvTile)) chunks.end();
  });
  if (tid == 0 && w.faults) atomicOr(p.counters + kFaults, w.faults);
  end_item(rows, chunks.partial);
}

// The last item of a merge unit to arrive folds the unit; counters are left at zero for the next launch.
template <class Traits>
__device__ __forceinline__ void arrive(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                       const Work& w, int tid, char* shared) {
  if constexpr (kComposes<Traits>)
    if (w.levels) return arrive_at_levels<Traits>(p, c, control, w, tid, shared);
  __threadfence();
  ptx::named_barrier(1, kConsumers);
  int32_t* counter = p.counters + kArrivals + w.unit * p.num_kv_heads + w.kv_head;
  // The barrier carries the answer. It was a word of shared memory, whose reads racecheck took for races
  // where warpgroups had met on their own before.
  bool last = false;
  if (tid == 0) last = atomicAdd(counter, 1) == w.num_items - 1;
  if (!ptx::named_barrier_or(1, kConsumers, last)) return;
  FI_MARK(control, "last of its unit");
  __threadfence();
  if (tid == 0) *counter = 0;
  merge<Traits>(p, c, w, tid, shared);
}

template <class Traits>
__device__ __forceinline__ void consume(const AttentionParams& p, const LaunchConstants& c, Control& control,
                                        char* shared, uint32_t stages) {
  const int tid = threadIdx.x;
  // Else the first result waits for its scale behind all tiles that are under way.
  constexpr int kLine = 32;
  if (tid * kLine < p.num_kv_heads * max(p.v_scale_stride, 1) && p.v_scale)
    ptx::prefetch_l1(p.v_scale + tid * kLine);
  Ring<Traits::kStages> stage;
  Ring<kSlots> slot;
  while (true) {
    ptx::mbarrier_wait(ptx::shared_address(&control.slot_full[slot.at]), slot.parity());
    const Work& w = control.slots[slot.at];
    FI_MARK(control, "item");
    if constexpr (Traits::kWgmma) ptx::bulk_wait_read();  // the slices are written again, or given back
    if (w.item < 0) return;
    const int tiles = ring_tiles<Traits>(w);
    bool finished = false;
    if constexpr (Traits::kInvariant)
      run_invariant_item<Traits>(p, c, control, w, tid, shared, stages, stage, tiles);
    else
      finished = run_item<Traits>(p, c, control, w, tid, shared, stages, stage, tiles);
    stage.advance(tiles + (kRingQueries<Traits> ? w.query_tiles : 0));
    FI_MARK(control, "stored");
    if (w.unit >= 0 && !finished) arrive<Traits>(p, c, control, w, tid, shared);
    FI_MARK(control, "merged");
    // Warps without a share must not run ahead of the ring by more than a lap.
    if (Traits::kInvariant && row_groups(w) < Traits::kMaxGroups) ptx::named_barrier(1, kConsumers);
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.slot_empty[slot.at]), tid % 32);
    slot.advance();
  }
}

}  // namespace fi::sm80
