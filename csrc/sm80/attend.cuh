// SPDX-License-Identifier: Apache-2.0
// How the consumer warps go through the tiles of an item: each takes tiles of its own, unless tiles are
// transformed in place, which warps share.
#pragma once
#include "consumer.cuh"

namespace fi::sm80 {

// attend() where tiles are transformed in place and several row groups read each: all warps, or those that
// the batch-invariant mode has, transform a part of every tile, and then multiply those of their own.
template <class Traits, int kRows, class BeforeTile>
__device__ __forceinline__ void attend_together(Consumer<Traits>& x, Control& control, uint32_t stages,
                                                Ring<Traits::kStages> stage, int tiles,
                                                BeforeTile before_tile) {
  constexpr bool kInvariant = Traits::kInvariant;
  const int warps = kInvariant ? row_groups(x.w) * Traits::kColumnWarps : kConsumerWarps;
  const int part = kInvariant ? x.group * Traits::kColumnWarps + x.column_warp : x.warp;
  const int others = kInvariant ? 0 : x.members - 1;  // whose turn it is goes round
  const float scale = x.logit_scale();
#pragma unroll 1
  for (int i = 0; i < tiles; ++i, stage.advance()) {
    const uint32_t tile = stages + stage.at * Traits::kStageBytes;
    const int key_begin = x.w.kv_begin + i * Traits::kKvTile;
    ptx::mbarrier_wait(full_barrier(control, stage), stage.lap >> 1 & 1);
    transform_in_place<Traits>(x.p, x.w, x.kv_head(), tile, key_begin, part, warps);
    ptx::named_barrier(kWideBarrier, warps * 32);
    if ((i & others) == x.member) {
      before_tile(i);
      if (x.group * 16 < x.w.q_rows) x.template step<kRows>(tile, 0, key_begin, scale);
    }
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[stage.at]), x.lane,
                              kInvariant ? x.members : 1);
  }
}

// How a lane follows the keys that it turns, which turn by the same from each to the next. Sines are worked
// out for its first key, and anew every kExact tiles, before errors of float32 add up.
template <class Traits, int kShare>
struct TurningShare {
  using Lanes = TurningLanes<Traits>;
  static constexpr int kExact = 32, kPasses = ceil_div(kShare, Lanes::kRows);
  // Rows of a lane that are loaded together, since loads do not pass the stores of those before. As many rows
  // further on the swizzle is the same.
  static constexpr int kTogether = Lanes::kRows >= 8            ? 1
                                   : kPasses * Lanes::kRows < 8 ? kPasses
                                                                : 8 / Lanes::kRows;
  static_assert(kPasses % kTogether == 0 && (kPasses == kTogether || kTogether * Lanes::kRows % 8 == 0));

  const AttentionParams& p;
  const int chunk, row;  // of the first pass
  const bool turns;
  KeyIndexOf<int> key;
  Phases by_pass, by_step, now;
  uint32_t low[kTogether], high[kTogether];  // where a lane's pairs of the first rows are in a tile

  // Rows [kShare part, kShare (part + 1)) of every tile from `first` on, `step` tiles apart.
  template <class Consumer>
  __device__ __forceinline__ TurningShare(const Consumer& x, int part, int first, int step)
      : p(x.p),
        chunk(min(x.lane % Lanes::kLanes, Lanes::kChunks - 1)),
        row(part * kShare + x.lane / Lanes::kLanes),
        turns(x.lane % Lanes::kLanes < Lanes::kChunks && x.lane / Lanes::kLanes < kShare),
        key{x.w.request, x.w.kv_begin + first * Traits::kKvTile + row, x.w.kv_head} {
    by_pass = phases_of<Traits, Variant>(p, chunk, key, Lanes::kRows);
    by_step = phases_of<Traits, Variant>(p, chunk, key, step * Traits::kKvTile - kPasses * Lanes::kRows);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      low[i] = swizzled(Traits::kKvTile, row + i * Lanes::kRows, chunk);
      high[i] = swizzled(Traits::kKvTile, row + i * Lanes::kRows, chunk + Lanes::kChunks);
      asm volatile("" : "+r"(low[i]), "+r"(high[i]));  // not to be worked out again in the loop
    }
  }

  // Before the tile whose keys begin at `begin`.
  __device__ __forceinline__ void restart(int begin) {
    key.kv_pos = begin + row;
    now = phases_of<Traits, Variant>(p, chunk, key, 0);
  }

  __device__ __forceinline__ void turn(uint32_t tile) {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kTogether, tile += kTogether * Lanes::kRows * kRowBytes) {
      TurningPairs<Traits> pairs[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        pairs[i].low = tile + low[i];
        pairs[i].high = tile + high[i];
        if (turns) pairs[i].load();
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (turns) {
          pairs[i].turn(now);
          pairs[i].store();
        }
        now.advance(by_pass);
      }
    }
    now.advance(by_step);
  }
};

// attend() of one row group whose tiles are transformed in place: a warp transforms sixteen keys of a tile
// and multiplies the same, so that nobody waits for another warp, and a stage is free soon.
template <class Traits, int kRows>
__device__ __forceinline__ void attend_alone(Consumer<Traits>& x, Control& control, uint32_t stages,
                                             Ring<Traits::kStages> stage, int tiles) {
  constexpr int kKeys = kKeysAlone, kWarps = Traits::kKvTile / kKeys, kAtOnce = kConsumerWarps / kWarps;
  const int part = x.warp % kWarps, first = x.warp / kWarps;
  const float scale = x.logit_scale();
  int key_begin = x.w.kv_begin + first * Traits::kKvTile;
  stage.advance(first);
  const auto attend_tiles = [&](int i, int end, const auto& transform) {
#pragma unroll 1
    for (; i < end; i += kAtOnce) {
      const uint32_t tile = stages + stage.at * Traits::kStageBytes;
      ptx::mbarrier_wait(full_barrier(control, stage), stage.lap >> 1 & 1);
      transform(tile);
      __syncwarp();
      x.template step<kRows, kKeys / 8>(tile, part * kKeys, key_begin, scale);
      ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[stage.at]), x.lane, kAtOnce);
      key_begin += kAtOnce * Traits::kKvTile;
      stage.advance(kAtOnce);
    }
  };
  if constexpr (kTurnsEvenly<Traits>) {
    if (turns_in_place<Traits>(x.p)) {
      TurningShare<Traits, kKeys> share(x, part, first, kAtOnce);
      constexpr int kExact = share.kExact * kAtOnce;
#pragma unroll 1
      for (int i = first; i < tiles; i += kExact) {
        share.restart(key_begin);
        attend_tiles(i, min(tiles, i + kExact), [&](uint32_t tile) { share.turn(tile); });
      }
      return;
    }
  }
  attend_tiles(first, tiles, [&](uint32_t tile) {
    transform_in_place<Traits>(x.p, x.w, x.kv_head(), tile, key_begin, part, kWarps);
  });
}

// attend() of several row groups whose keys turn evenly: all warps turn a part of every tile, and one of each
// group multiplies it. Nobody waits but who multiplies.
template <class Traits, int kRows>
__device__ __forceinline__ void attend_turning(Consumer<Traits>& x, Control& control, uint32_t stages,
                                               Ring<Traits::kStages> stage, int tiles) {
  TurningShare<Traits, Traits::kKvTile / kConsumerWarps> share(x, x.warp, 0, 1);
  uint32_t laps = control.turned_laps[x.warp];  // of each stage, a bit: how often it has been turned
  const float scale = x.logit_scale();
  const int others = x.members - 1;  // whose turn it is goes round
  int key_begin = x.w.kv_begin;
#pragma unroll 1
  for (int i = 0; i < tiles;) {
    share.restart(key_begin);
#pragma unroll 1
    for (const int end = min(tiles, i + share.kExact); i < end; ++i) {
      const uint32_t tile = stages + stage.at * Traits::kStageBytes;
      ptx::mbarrier_wait(full_barrier(control, stage), stage.lap >> 1 & 1);
      share.turn(tile);
      const uint32_t turned = ptx::shared_address(&control.turned[stage.at]);
      ptx::mbarrier_arrive_warp(turned, x.lane);
      if ((i & others) == x.member && x.group * 16 < x.w.q_rows) {
        ptx::mbarrier_wait(turned, laps >> stage.at & 1);
        x.template step<kRows>(tile, 0, key_begin, scale);
      }
      laps ^= 1u << stage.at;
      ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[stage.at]), x.lane);
      key_begin += Traits::kKvTile;
      stage.advance();
    }
  }
  if (x.lane == 0) control.turned_laps[x.warp] = laps;
  __syncwarp();
}

// This warp's share of an item's tiles, the first being at `stage` of the ring. kRows: 1 where the second row
// of a lane does not exist.
template <class Traits, int kRows = 2, class BeforeTile>
__device__ __forceinline__ void attend(Consumer<Traits>& x, Control& control, uint32_t stages,
                                       Ring<Traits::kStages> stage, int tiles, BeforeTile before_tile) {
  constexpr bool kInPlace = kTransformsInPlace<Traits>;
  static_assert(!(kInPlace && kHalves<Traits>), "a warp transforms what it reads");
  if constexpr (kTransformsAlone<Traits>)
    if (x.transforms_alone()) return attend_alone<Traits, kRows>(x, control, stages, stage, tiles);
  if constexpr (kTurnsEvenly<Traits>)
    if (!x.in_bundle() && turns_in_place<Traits>(x.p))
      return attend_turning<Traits, kRows>(x, control, stages, stage, tiles);
  if constexpr (kInPlace)
    if (row_groups(x.w) > 1)
      return attend_together<Traits, kRows>(x, control, stages, stage, tiles, before_tile);
  const int kv_begin = x.w.kv_begin;
  // Heads of a bundle take turns in the ring, and their warps take turns at their tiles.
  const int heads_log2 = kBundles<Traits> ? x.w.heads_log2 : 0;
  const int shared = x.sharers_log2();
  const int first = (x.member >> shared << heads_log2) + (x.in_bundle() ? x.place() : 0);
  const int step = Traits::kInvariant ? 1 : x.members >> shared << heads_log2;
  const float scale = x.logit_scale();
  const bool has_rows = x.group * 16 < x.w.q_rows;  // a group without rows frees its tiles all the same
  stage.advance(first);
#pragma unroll 1
  for (int i = first; i < tiles; i += step) {
    before_tile(i);
    ptx::mbarrier_wait(full_barrier(control, stage), stage.lap >> 1 & 1);
    if (i == first) {
      FI_MARK(control, "first tile");
    }
    if (has_rows) {
      const uint32_t tile = stages + stage.at * Traits::kStageBytes;
      const int key_begin = kv_begin + (i >> heads_log2) * Traits::kKvTile;
      if constexpr (kHalves<Traits>) {
#pragma unroll 1
        for (int half = shared ? x.member & 1 : 0; half < 2; half += 1 + shared)
          x.template step<kRows>(tile, half * (Traits::kKvTile / 2), key_begin, scale);
      } else {
        if constexpr (kInPlace) {
          transform_in_place<Traits>(x.p, x.w, x.kv_head(), tile, key_begin, x.column_warp,
                                     Traits::kColumnWarps);
          x.sync_columns();
        }
        x.template step<kRows>(tile, 0, key_begin, scale);
      }
    }
    // The ring waits for as many arrivals as there are warps; a tile is read by fewer of them.
    ptx::mbarrier_arrive_warp(ptx::shared_address(&control.empty[stage.at]), x.lane,
                              x.members >> shared << heads_log2);
    stage.advance(step);
  }
}

}  // namespace fi::sm80
