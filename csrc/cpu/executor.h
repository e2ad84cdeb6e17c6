// SPDX-License-Identifier: Apache-2.0
// What one thread does with a work item: the online softmax over its KV range, tile by tile.
#pragma once
#include <algorithm>
#include <atomic>

#include "amx_few_rows.h"
#include "amx_tile.h"
#include "item_rows.h"
#include "prefetch.h"
#include "softmax.h"
#include "transforms.h"
#include "vector_tile.h"

namespace fi::cpu {

// Floats of an output row: whole groups of the engine's columns.
inline constexpr int pad_columns(int dim) { return (dim + 31) / 32 * 32; }

template <class Q, class KV, class Variant>
class Executor : private ItemRows {
 public:
  // Heads that run_tickets() can take at once: a state has 16 row slots for each of them.
  static constexpr int kMaxHeads = kMaxQueryTile / kSlotRows;

  // Whether several heads at once are worth it: they are where their rows lie side by side, so that a thread
  // reads whole pages instead of a piece of each.
  static bool prefers_many_heads(const AttentionParams& p) {
    return has_matrix_unit() && p.k_stride_head == p.head_dim && p.v_stride_head == p.head_dim_v;
  }

  // What a variant transforms, and sums that are no averages, stay in float.
  static constexpr bool kUsesAmx = kHasAmx<Q, KV> && Variant::kSoftmax && !Variant::kTransformsQuery &&
                                   !Variant::kTransformsKey && !Variant::kTransformsValue;

  // Prepares this thread for a launch.
  void begin(const AttentionParams& params) {
    p_ = &params;
    header_ = reinterpret_cast<const PlanHeader*>(params.plan + params.layout.header);
    o_stride_ = pad_columns(params.head_dim_v);
    if (params.head_dim > dim_capacity_ || params.head_dim_v > dim_v_capacity_) {
      dim_capacity_ = std::max(dim_capacity_, params.head_dim);
      dim_v_capacity_ = std::max(dim_v_capacity_, params.head_dim_v);
      arena_.build([this] { take_memory(); });
    }
    with_engine([&](auto& engine) { engine.begin(params.head_dim, params.head_dim_v); });
#if defined(FI_AMX)
    few_rows_.begin(params.head_dim, params.head_dim_v);
#endif
  }

  void end() {
#if defined(FI_AMX)
    if (has_matrix_unit()) amx::release();
#endif
  }

  // Tickets of one item: KV heads [kv_head, kv_head + heads), heads <= kMaxHeads.
  void run_tickets(int32_t item_index, int32_t kv_head, int32_t heads) {
    item_ = reinterpret_cast<const WorkItem*>(p_->plan + p_->layout.items) + item_index;
    locate_item();
    const int32_t together = few_rows() ? heads : 1;
    for (int32_t h = 0; h < heads; h += together) {
      if (h > 0 && item_->unit >= 0) locate_item();  // merging has left the item's rows
      run_heads(kv_head + h, together);
    }
  }

 private:
  static bool has_matrix_unit() {
#if defined(FI_AMX)
    if constexpr (kUsesAmx) return amx::available();
#endif
    return false;
  }

  void take_memory() {
    const int64_t outputs = int64_t(kMaxQueryTile) * pad_columns(dim_v_capacity_);
    o_ = arena_.take<float>(outputs);
    fold_ = arena_.take<float>(outputs);
    s_ = arena_.take<float>(int64_t(kMaxQueryTile) * kKeyTile);
    if constexpr (Variant::kTransformsKey || Variant::kTransformsValue)
      elements_ = arena_.take<float>(int64_t(pad_lanes(std::max(dim_capacity_, dim_v_capacity_))) * kLanes);
    with_engine(
        [this](auto& engine) { engine.take_memory(arena_, kMaxQueryTile, dim_capacity_, dim_v_capacity_); });
#if defined(FI_AMX)
    if (has_matrix_unit()) few_rows_.take_memory(arena_, kMaxQueryTile, dim_capacity_, dim_v_capacity_);
#endif
  }

  void locate_item() {
    if (item_->flags & kPrefix)
      locate_node(*item_);
    else
      locate_request<Variant>(item_->request, item_->q_begin, item_->q_rows);
  }

  void run_heads(int32_t kv_head, int32_t heads) {
    kv_head_ = kv_head;
    heads_ = heads;
    if (rows_ > 0) {
      read_queries();
      const int32_t grid = header_->invariant_grid;
      if (grid == 0) {
        attend(first_key(kKeyTile), end_key());
        emit(item_->partial, o_, lse_);
      } else if (item_->flags & kFirstChunk) {
        fold_chunks(grid);
        emit(item_->partial, fold_, fold_lse_);
      } else {
        int32_t row = item_->partial;
        for (int64_t k = item_->kv_begin; k < item_->kv_end; k += grid, row += item_->q_rows) {
          attend(int32_t(k), end_of_chunk(k, grid));
          emit(row, o_, lse_);
        }
      }
    }
    if (item_->unit < 0) return;
    for (int h = 0; h < heads; ++h) for_units([&](int32_t unit) { arrive(unit, kv_head + h); });
  }

  // The engine that multiplies: the matrix unit where there is one, else vectors.
  template <class F>
  void with_engine(F f) {
#if defined(FI_AMX)
    if constexpr (kUsesAmx)
      if (amx::available()) return f(amx_);
#endif
    f(vector_);
  }

  bool few_rows() const { return rows_ <= kSlotRows && has_matrix_unit(); }

  void read_queries() {
    const auto* base = static_cast<const Q*>(p_->q);
    const auto read = [&](auto& engine, int slot, int row, int count) {
      const Q* rows[kMaxQueryTile];
      for (int i = 0; i < count; ++i)
        rows[i] = base + (token0_ + token_[row + i]) * p_->q_stride_token +
                  qo_head_of(slot + i, row + i) * p_->q_stride_head;
      engine.set_queries(slot, count, rows);
      if constexpr (Variant::kTransformsQuery)
        for (int i = 0; i < count; ++i)
          transform_query<Variant>(*p_, row_index_of(slot + i, row + i), engine.query(slot + i));
    };
#if defined(FI_AMX)
    if constexpr (kUsesAmx)
      if (few_rows()) {
        few_rows_.begin_item(rows_);
        for (int h = 0; h < heads_; ++h) read(few_rows_, h * kSlotRows, 0, rows_);
        return;
      }
#endif
    with_engine([&](auto& engine) {
      constexpr int kBlock = std::remove_reference_t<decltype(engine)>::kRowBlock;
      engine.begin_item();
      for (int r = 0; r < rows_; r += kBlock) read(engine, r, r, std::min(kBlock, rows_ - r));
    });
  }

  // Where the item starts: a first chunk reaches down to the window's true begin.
  int32_t first_key(int32_t align) const {
    if (!(item_->flags & kFirstChunk)) return item_->kv_begin;
    return std::min(item_->kv_begin, keys_.begin / align * align);
  }

  // Where it ends: a last chunk reaches up to the true end of what its rows see.
  int32_t end_key() const {
    return item_->flags & kLastChunk ? keys_.end : std::min(item_->kv_end, keys_.end);
  }

  int32_t end_of_chunk(int64_t begin, int32_t grid) const {
    return int32_t(std::min<int64_t>(begin + grid, keys_.end));
  }

  void fold_chunks(int32_t grid) {
    clear_fold();
    const int32_t end = end_key();
    for (int64_t k = first_key(grid); k < end; k += grid) {
      attend(int32_t(k), end_of_chunk(k, grid));
      for_slots([&](int slot, int) { join(slot, o_ + slot * o_stride_, lse_[slot]); });
    }
  }

  // The fold of a row takes up another state.
  void join(int slot, const float* other, float lse) {
    float* o = fold_ + slot * o_stride_;
    if constexpr (Variant::kSoftmax)
      merge_into(o, fold_lse_[slot], other, lse, o_stride_);
    else
      add_into(o, fold_lse_[slot], other, o_stride_);
  }

  void clear_fold() {
    for_slots([&](int slot, int) {
      fold_lse_[slot] = kEmpty;
      std::fill_n(fold_ + slot * o_stride_, o_stride_, 0.0f);
    });
  }

  // The attention state (o_, lse_) of every row over the keys in [begin, end).
  void attend(int32_t begin, int32_t end) {
    for_slots([&](int slot, int) {
      softmax_[slot] = RunningSoftmax{};
      std::fill_n(o_ + slot * o_stride_, o_stride_, 0.0f);
    });
    first_ = std::max(begin, keys_.begin);
    last_ = std::min(end, keys_.end);
    const int64_t start = begin + (first_ - begin) / kKeyTile * kKeyTile;
    locate_tile(tokens_[0], start);
    if (few_rows()) {
      if (start < last_) attend_few_rows(start);
    } else {
      with_engine([&](auto& engine) {
        int now = 0;
        for (int64_t tile = start; tile < last_; tile += kKeyTile, now = 1 - now) {
          locate_tile(tokens_[1 - now], tile + kKeyTile);
          attend_tile(engine, int32_t(tile), tokens_[now], tokens_[1 - now]);
        }
      });
    }
    for_slots([&](int slot, int) { finish_row(slot); });
  }

  void finish_row(int slot) {
    float* o = o_ + slot * o_stride_;
    if constexpr (!Variant::kSoftmax) {
      lse_[slot] = 0.0f;
      return;
    }
    if (softmax_[slot].sum == 0.0f) {
      lse_[slot] = kEmpty;
      std::fill_n(o, o_stride_, 0.0f);
      return;
    }
    lse_[slot] = softmax_[slot].lse();
    with_engine([&](auto& engine) { engine.finish_row(o); });
    // Adding zero clears the sign of an underflown zero, which depends on skipped tiles.
    for (int d = 0; d < o_stride_; d += kLanes) store(o + d, load(o + d) / softmax_[slot].sum + 0.0f);
  }

  bool visible_keys(uint64_t* visible, int slot, int32_t tile, const Tokens<KV>& tokens) const {
    return this->template find_visible<Variant>(visible, slot, tile, tokens.begin, tokens.end);
  }

  void locate_tile(Tokens<KV>& tokens, int64_t tile) const {
    tokens.begin = tokens.end = 0;
    if (tile >= last_) return;
    const int64_t low = std::max<int64_t>(first_ - tile, 0), high = std::min<int64_t>(last_ - tile, kKeyTile);
    locate_tokens(*p_, request_, kv_head_, int32_t(tile), {int32_t(low), int32_t(high)}, tokens);
  }

#if defined(FI_AMX)
  // Tiles from outside to inside, heads within: where heads lie side by side, pages are read from end to end.
  void attend_few_rows(int64_t start) {
    if constexpr (kUsesAmx) {
      struct Step {
        int64_t tile;
        int head, now;  // tokens_[now] are those of the tile
        bool uniform;
        uint64_t visible[kSlotRows];
      };
      AmxFewRows<KV>& engine = few_rows_;
      const Tokens<KV> nothing{};
      Prefetcher<KV> ahead(nothing, 0, 0, 0);
      const auto enter_tile = [&](const Step& step) {
        const Tokens<KV>& tokens = tokens_[step.now];
        engine.set_keys(tokens.k, tokens.begin, tokens.end);
      };
      const auto soften_step = [&](Step& step) {
        const int slot = step.head * kSlotRows;
        step.uniform = visible_keys(step.visible, slot, int32_t(step.tile), tokens_[step.now]);
        engine.take_scores(s_);
        this->template soften_rows<AmxFewRows<KV>>(slot, 0, rows_, int32_t(step.tile), step.visible, s_,
                                                   ahead);
        engine.begin_sums(0, rows_, s_, alpha_ + slot, o_ + slot * o_stride_, o_stride_);
      };
      // One head reads the keys of the next tile together with the values of this one, which have to be
      // there.
      const int far = heads_ > 1 ? 1 : 2;
      const int64_t k_size = int64_t(heads_) * p_->head_dim, v_size = int64_t(heads_) * p_->head_dim_v;

      Step step{start, 0, 0, true, {}};
      locate_tile(tokens_[1], start + kKeyTile);
      enter_tile(step);
      engine.dot(0, 0, ahead);
      soften_step(step);
      for (bool more = true; more;) {
        if (step.head == 0) {
          Tokens<KV>& tokens = tokens_[(step.now + far) % 3];
          locate_tile(tokens, step.tile + far * kKeyTile);
          ahead = Prefetcher<KV>(tokens, k_size, v_size, heads_ * engine.steps());
        }
        Step next{step.tile, step.head + 1, step.now, true, {}};
        if (next.head == heads_) next = {step.tile + kKeyTile, 0, (step.now + 1) % 3, true, {}};
        more = next.tile < last_;
        const Tokens<KV>& tokens = tokens_[step.now];
        const typename AmxFewRows<KV>::Values values{tokens.v,
                                                     tokens.begin,
                                                     tokens.end,
                                                     step.head * p_->v_stride_head,
                                                     step.uniform ? nullptr : step.visible,
                                                     o_ + step.head * kSlotRows * o_stride_,
                                                     o_stride_};
        if (more) {
          if (next.head == 0) enter_tile(next);
          engine.add_values_and_dot(values, next.head * kSlotRows, next.head * p_->k_stride_head, ahead);
          soften_step(next);
        } else {
          engine.add_values(values, ahead);
        }
        step = next;
      }
    }
  }
#else
  void attend_few_rows(int64_t) {}
#endif

  // The keys of one tile, those that some row may see; asks for the memory of the `next` one meanwhile.
  template <class Engine>
  void attend_tile(Engine& engine, int32_t tile, const Tokens<KV>& tokens, const Tokens<KV>& next) {
    const bool uniform = visible_keys(visible_, 0, tile, tokens);
    if (Variant::has_mask(*p_)) {
      uint64_t any = 0;
      for (int r = 0; r < rows_; ++r) any |= visible_[r];
      if (any == 0) return;
    }
    Prefetcher<KV> ahead(next, p_->head_dim, p_->head_dim_v, engine.steps(rows_));
    engine.set_keys(tokens.k, tokens.begin, tokens.end, ahead);
    if constexpr (Variant::kTransformsKey)
      engine.transform_keys(elements_, KeyTransform<Variant>(*p_, request_, kv_head_, tile));
    constexpr int kBlock = Engine::kRowBlock;
    const auto for_blocks = [&](auto f) {
      for (int r = 0; r < rows_; r += kBlock) {
        const int n = std::min(kBlock, rows_ - r);
        uint64_t any = 0;
        for (int i = 0; i < n; ++i) any |= visible_[r + i];
        if (any) f(r, n, s_ + (Engine::kKeepsScores ? r * kKeyTile : 0), o_ + int64_t(r) * o_stride_);
      }
    };
    for_blocks([&](int r, int n, float* s, float* o) {
      engine.dot_keys(r, n, s, ahead);
      if constexpr (Engine::kSoftensWhole) {
        uint64_t common = ~uint64_t(0);
        for (int i = 0; i < n; ++i) common &= visible_[r + i];
        if (n == kBlock && ~common == 0 && is_plain(r))
          return engine.soften_whole(r, score_scale_of(r) * kLog2E, softmax_ + r, alpha_ + r, o, o_stride_);
      }
      engine.take_scores(s);
      this->template soften_rows<Engine>(r, r, n, tile, visible_ + r, s, ahead);
      engine.begin_sums(r, n, s, alpha_ + r, o, o_stride_);
    });
    bool finite = engine.set_values(tokens.v, rows_, !uniform || Variant::kTransformsValue, ahead);
    if constexpr (Variant::kTransformsValue)
      finite = engine.transform_values(elements_, ValueTransform<Variant>(*p_, request_, kv_head_, tile));
    for_blocks([&](int r, int n, float* s, float* o) {
      // Zero times NaN is NaN: where rows differ in what they see, a special value must not reach all of
      // them.
      if (uniform || finite)
        engine.finish_sums(r, n, s, o, o_stride_, ahead);
      else
        engine.finish_visible_sums(r, n, s, visible_ + r, o, o_stride_, ahead);
    });
  }

  // A variant that transforms keys is given dequantised ones.
  float score_scale_of(int slot) const { return Variant::kTransformsKey ? p_->scale : logit_scale_of(slot); }

  // Whether dot products have only to be scaled. A negative scale turns their order around.
  bool is_plain(int slot) const { return !Variant::has_transform(*p_) && score_scale_of(slot) > 0.0f; }

  // Dot products of `count` rows become probabilities relative to their running maxima.
  template <class Engine, class F>
  void soften_rows(int slot, int row, int count, int32_t tile, const uint64_t* visible, float* s, F& ahead) {
    const float scale = score_scale_of(slot);
    const bool plain = is_plain(slot);
    const float unit = plain ? scale * kLog2E : kLog2E;
    for (int i = 0; i < count; ++i) {
      if (!plain) {
        LogitIndex index = index_of(slot + i, row + i);
        index.kv_pos = tile;
        transform_row<Variant>(*p_, index, scale, s + i * kKeyTile);
      }
      if constexpr (!Variant::kSoftmax) {
        keep_visible(s + i * kKeyTile, visible[i]);
        alpha_[slot + i] = 1.0f;
        ahead.step();
        continue;
      }
      alpha_[slot + i] = raise_max(s + i * kKeyTile, visible[i], unit, softmax_[slot + i]);
    }
    for (int i = 0; Variant::kSoftmax && i < count; ++i) {
      take_exponents(s + i * kKeyTile, visible[i], unit, softmax_[slot + i]);
      if (i % 8 == 4) Engine::stay_awake();
      ahead.step();
    }
  }

  void emit(int32_t partial, const float* o, const float* lse) {
    for_slots([&](int slot, int row) {
      if (partial < 0) return write_output(slot, row, o, lse);
      const int64_t at = int64_t(partial + row) * header_->num_kv_heads + kv_head_of(slot);
      p_->partial_lse[at] = lse[slot];
      copy_row(o + slot * o_stride_, p_->partial_out + at * p_->head_dim_v);
    });
  }

  void copy_row(const float* from, float* to) const {
    std::memcpy(to, from, sizeof(float) * size_t(p_->head_dim_v));
  }

  void write_output(int slot, int row, const float* o, const float* lse) const {
    using O = Q;
    const int64_t token = token0_ + token_[row];
    const int32_t head = qo_head_of(slot, row);
    const RowIndex index = row_index_of(slot, row);
    float total = lse[slot];
    float factor = total == kEmpty ? 0.0f : Variant::finish(*p_, index, total);
    if (p_->lse) p_->lse[token * p_->lse_stride_token + head * p_->lse_stride_head] = total;
    O* to = static_cast<O*>(p_->out) + token * p_->out_stride_token + head * p_->out_stride_head;
    const float* from = o + slot * o_stride_;
    if constexpr (Variant::kTransformsOutput) {
      if (total != kEmpty) {
        float* own = const_cast<float*>(from);  // the item is through with the row
        for (int d = 0; d < p_->head_dim_v; ++d)
          own[d] = Variant::output_transform(*p_, own[d] * factor, d, index, total);
        factor = 1.0f;
      }
    }
    for (int d = 0; d < p_->head_dim_v; d += kLanes) {
      const Vec v = load(from + d) * factor;
      const int n = p_->head_dim_v - d;
      n >= kLanes ? store_float(to + d, v) : store_float(to + d, v, n);
    }
  }

  // Calls f(unit) for every merge unit that the item reports to.
  template <class F>
  void for_units(F f) const {
    if (!(item_->flags & kPrefix)) return f(item_->unit);
    const auto* list = reinterpret_cast<const int32_t*>(p_->plan + p_->layout.reports) + item_->unit;
    for (int32_t i = 1; i <= list[0]; ++i) f(list[i]);
  }

  // The last item of a merge unit folds the unit's parts in the plan's order.
  void arrive(int32_t index, int32_t kv_head) {
    const MergeUnit& unit = reinterpret_cast<const MergeUnit*>(p_->plan + p_->layout.units)[index];
    std::atomic_ref<int32_t> arrivals(
        p_->counters[kArrivals + int64_t(index) * header_->num_kv_heads + kv_head]);
    if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 != unit.num_items) return;
    arrivals.store(0, std::memory_order_relaxed);
    locate_request<Variant>(unit.request, unit.q_begin, unit.q_rows);
    kv_head_ = kv_head;
    heads_ = 1;
    clear_fold();
    const auto* parts = reinterpret_cast<const int32_t*>(p_->plan + p_->layout.parts);
    for (int32_t part = unit.parts_begin; part < unit.parts_end; ++part) {
      for (int r = 0; r < rows_; ++r) {
        const int64_t at = int64_t(parts[part] + r) * header_->num_kv_heads + kv_head;
        copy_row(p_->partial_out + at * p_->head_dim_v, o_);
        std::fill(o_ + p_->head_dim_v, o_ + o_stride_, 0.0f);
        join(r, o_, p_->partial_lse[at]);
      }
    }
    emit(-1, fold_, fold_lse_);
  }

  const PlanHeader* header_ = nullptr;
  const WorkItem* item_ = nullptr;
  Arena arena_;
  int dim_capacity_ = 0, dim_v_capacity_ = 0, o_stride_ = 0;
  float *s_ = nullptr, *o_ = nullptr, *fold_ = nullptr, *elements_ = nullptr;
  VectorTile<Q, KV> vector_;
#if defined(FI_AMX)
  AmxTile<KV> amx_;
  AmxFewRows<KV> few_rows_;
#endif

  int32_t first_ = 0, last_ = 0;     // of keys_, the part that attend() is at
  uint64_t visible_[kMaxQueryTile];  // by row, of the current tile
  // By slot.
  RunningSoftmax softmax_[kMaxQueryTile];
  float alpha_[kMaxQueryTile];
  float lse_[kMaxQueryTile], fold_lse_[kMaxQueryTile];
  Tokens<KV> tokens_[3];  // of this tile and of the next ones
};

}  // namespace fi::cpu
