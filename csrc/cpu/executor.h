// SPDX-License-Identifier: Apache-2.0
// What one thread does with a work item: the online softmax over its KV range, tile by tile.
#pragma once
#include <algorithm>
#include <atomic>

#include "../core/params.h"
#include "../core/variant.h"
#include "amx_tile.h"
#include "prefetch.h"
#include "softmax.h"
#include "vector_tile.h"

namespace fi::cpu {

struct VecMath {
  static Vec tanh(Vec x) { return cpu::tanh(x); }
  static Vec to_float(IVec x) { return __builtin_convertvector(x, Vec); }
};

#if defined(FI_AMX)
template <class Q, class KV>
inline constexpr bool kHasAmx = std::is_same_v<Q, dtype::bfloat16> && AmxTile<KV>::kExact;
#else
template <class Q, class KV>
inline constexpr bool kHasAmx = false;
#endif

// Floats of an output row: whole groups of the engine's columns.
inline constexpr int pad_columns(int dim) { return (dim + 31) / 32 * 32; }

template <class Q, class KV, class Variant>
class Executor {
 public:
  // Prepares this thread for a launch.
  void begin(const AttentionParams& params) {
    p_ = &params;
    header_ = reinterpret_cast<const PlanHeader*>(params.plan + params.layout.header);
    o_stride_ = pad_columns(params.head_dim_v);
    if (params.head_dim > dim_capacity_ || params.head_dim_v > dim_v_capacity_) {
      dim_capacity_ = std::max(dim_capacity_, params.head_dim);
      dim_v_capacity_ = std::max(dim_v_capacity_, params.head_dim_v);
      arena_.build([this] {
        const int64_t outputs = int64_t(kMaxQueryTile) * pad_columns(dim_v_capacity_);
        o_ = arena_.take<float>(outputs);
        fold_ = arena_.take<float>(outputs);
        s_ = arena_.take<float>(int64_t(kMaxQueryTile) * kKeyTile);
        with_engine([this](auto& engine) {
          engine.take_memory(arena_, kMaxQueryTile, dim_capacity_, dim_v_capacity_);
        });
      });
    }
    with_engine([&](auto& engine) { engine.begin(params.head_dim, params.head_dim_v); });
  }

  void end() {
    with_engine([](auto& engine) { engine.end(); });
  }

  void run_ticket(int32_t item_index, int32_t kv_head) {
    item_ = reinterpret_cast<const WorkItem*>(p_->plan + p_->layout.items) + item_index;
    kv_head_ = kv_head;
    logit_scale_ = p_->scale * (p_->k_scale ? p_->k_scale[kv_head * p_->k_scale_stride] : 1.0f);
    locate(item_->request, item_->q_begin, item_->q_rows);
    if (rows_ > 0) {
      read_queries();
      const int32_t grid = header_->invariant_grid;
      if (grid == 0) {
        attend(first_key(kKeyTile), item_->kv_end);
        emit(item_->partial, o_, lse_);
      } else if (item_->flags & kFirstChunk) {
        fold_chunks(grid);
        emit(item_->partial, fold_, fold_lse_);
      } else {
        int32_t row = item_->partial;
        for (int64_t k = item_->kv_begin; k < item_->kv_end; k += grid, row += item_->q_rows) {
          attend(int32_t(k), int32_t(std::min<int64_t>(k + grid, item_->kv_end)));
          emit(row, o_, lse_);
        }
      }
    }
    if (item_->unit >= 0) arrive();
  }

 private:
  // Which rows exist, and which keys they may see: from the exact lengths, not from the plan's bounds.
  void locate(int32_t request, int32_t q_begin, int32_t q_rows) {
    const LevelParams& level = p_->level;
    request_ = request;
    token0_ = p_->qo_indptr[request];
    const int64_t q_len = int64_t(p_->qo_indptr[request + 1]) - token0_;
    const int64_t capacity = row_capacity(level, request);
    kv_len_ = int32_t(std::min<int64_t>(level.kv_lens[request], capacity));
    q_pos0_ = int32_t(kv_len_ - q_len);
    rows_ = int32_t(std::clamp<int64_t>(q_len * p_->group - q_begin, 0, q_rows));
    keys_ = {kv_len_, 0};
    for (int r = 0; r < rows_; ++r) {
      token_[r] = (q_begin + r) / p_->group;
      qo_head_[r] = kv_head_ * p_->group + (q_begin + r) % p_->group;
      row_keys_[r] = Variant::visible_keys(*p_, q_pos0_ + token_[r], kv_len_);
      if (row_keys_[r].begin >= row_keys_[r].end) continue;
      keys_.begin = std::min(keys_.begin, row_keys_[r].begin);
      keys_.end = std::max(keys_.end, row_keys_[r].end);
    }
  }

  static int64_t row_capacity(const LevelParams& level, int32_t request) {
    const int64_t entries = level.row_end[request] - level.row_begin[request];
    return (entries + level.index_step - 1) / level.index_step * level.page_size;
  }

  // The engine that multiplies: the matrix unit where there is one, else vectors.
  template <class F>
  void with_engine(F f) {
#if defined(FI_AMX)
    if constexpr (kHasAmx<Q, KV>)
      if (amx::available()) return f(amx_);
#endif
    f(vector_);
  }

  void read_queries() {
    const auto* base = static_cast<const Q*>(p_->q);
    with_engine([&](auto& engine) {
      constexpr int kBlock = std::remove_reference_t<decltype(engine)>::kRowBlock;
      for (int r = 0; r < rows_; r += kBlock) {
        const int n = std::min(kBlock, rows_ - r);
        const Q* rows[kBlock];
        for (int i = 0; i < n; ++i)
          rows[i] =
              base + (token0_ + token_[r + i]) * p_->q_stride_token + qo_head_[r + i] * p_->q_stride_head;
        engine.set_queries(r, n, rows);
      }
    });
  }

  // Where the item starts: a first chunk reaches down to the window's true begin.
  int32_t first_key(int32_t align) const {
    if (!(item_->flags & kFirstChunk)) return item_->kv_begin;
    return std::min(item_->kv_begin, keys_.begin / align * align);
  }

  void fold_chunks(int32_t grid) {
    std::fill_n(fold_lse_, rows_, kEmpty);
    std::fill_n(fold_, rows_ * o_stride_, 0.0f);
    const int32_t end = std::min(item_->kv_end, keys_.end);
    for (int64_t k = first_key(grid); k < end; k += grid) {
      attend(int32_t(k), int32_t(std::min<int64_t>(k + grid, end)));
      for (int r = 0; r < rows_; ++r)
        merge_into(fold_ + r * o_stride_, fold_lse_[r], o_ + r * o_stride_, lse_[r], o_stride_);
    }
  }

  // The attention state (o_, lse_) of every row over the keys in [begin, end).
  void attend(int32_t begin, int32_t end) {
    std::fill_n(softmax_, rows_, RunningSoftmax{});
    std::fill_n(o_, rows_ * o_stride_, 0.0f);
    const int32_t first = std::max(begin, keys_.begin), last = std::min(end, keys_.end);
    const int64_t start = begin + (first - begin) / kKeyTile * kKeyTile;
    const auto locate_tile = [&](Tokens<KV>& tokens, int64_t tile) {
      tokens.begin = tokens.end = 0;
      if (tile >= last) return;
      const int64_t low = std::max<int64_t>(first - tile, 0), high = std::min<int64_t>(last - tile, kKeyTile);
      locate_tokens(tokens, int32_t(tile), {int32_t(low), int32_t(high)});
    };
    locate_tile(tokens_[0], start);
    with_engine([&](auto& engine) {
      int now = 0;
      for (int64_t tile = start; tile < last; tile += kKeyTile, now = 1 - now) {
        locate_tile(tokens_[1 - now], tile + kKeyTile);
        attend_tile(engine, int32_t(tile), tokens_[now], tokens_[1 - now]);
      }
    });
    for (int r = 0; r < rows_; ++r) {
      float* o = o_ + r * o_stride_;
      if (softmax_[r].sum == 0.0f) {
        lse_[r] = kEmpty;
        std::fill_n(o, o_stride_, 0.0f);
        continue;
      }
      lse_[r] = softmax_[r].lse();
      with_engine([&](auto& engine) { engine.finish_row(o); });
      // Adding zero clears the sign of an underflown zero, which depends on skipped tiles.
      for (int d = 0; d < o_stride_; d += kLanes) store(o + d, load(o + d) / softmax_[r].sum + 0.0f);
    }
  }

  // The keys of one tile, those that some row may see; asks for the memory of the `next` one meanwhile.
  template <class Engine>
  void attend_tile(Engine& engine, int32_t tile, const Tokens<KV>& tokens, const Tokens<KV>& next) {
    const int begin = tokens.begin, end = tokens.end;
    const uint64_t all = bit_range(begin, end);
    for (int r = 0; r < rows_; ++r)
      visible_[r] = bit_range(std::clamp(row_keys_[r].begin - tile, begin, end),
                              std::clamp(row_keys_[r].end - tile, begin, end));
    if (Variant::has_mask(*p_)) apply_mask(tile);
    bool uniform = true;
    for (int r = 0; r < rows_; ++r) uniform = uniform && visible_[r] == all;

    Prefetcher<KV> ahead(next, p_->head_dim, p_->head_dim_v);
    engine.set_keys(tokens.k, begin, end, ahead);
    constexpr int kBlock = Engine::kRowBlock;
    const auto for_blocks = [&](auto f) {
      for (int r = 0; r < rows_; r += kBlock) {
        const int n = std::min(kBlock, rows_ - r);
        uint64_t any = 0;
        for (int i = 0; i < n; ++i) any |= visible_[r + i];
        if (any) f(r, n, s_ + r * kKeyTile, o_ + int64_t(r) * o_stride_);
      }
    };
    for_blocks([&](int r, int n, float* s, float* o) {
      engine.dot_keys(r, n, s, ahead);
      soften_rows(r, n, tile, ahead);
      engine.begin_sums(r, n, s, alpha_ + r, o, o_stride_);
    });
    const bool finite = engine.set_values(tokens.v, rows_, !uniform, ahead);
    for_blocks([&](int r, int n, float* s, float* o) {
      // Zero times NaN is NaN: where rows differ in what they see, a special value must not reach all of
      // them.
      if (uniform || finite)
        engine.finish_sums(r, n, s, o, o_stride_, ahead);
      else
        engine.finish_visible_sums(r, n, s, visible_ + r, o, o_stride_, ahead);
    });
    ahead.finish();
  }

  void apply_mask(int32_t tile) {
    for (int r = 0; r < rows_; ++r) {
      if (!Variant::kMaskPerHead && r > 0 && token_[r] == token_[r - 1]) {
        visible_[r] = visible_[r - 1];
        continue;
      }
      const int32_t token = token_[r];
      LogitIndex index{request_, token, q_pos0_ + token, 0, qo_head_[r], kv_head_};
      uint64_t kept = 0;
      for (uint64_t bits = visible_[r]; bits; bits &= bits - 1) {
        index.kv_pos = tile + __builtin_ctzll(bits);
        if (Variant::logits_mask(*p_, index)) kept |= bits & -bits;
      }
      visible_[r] = kept;
    }
  }

  // Where keys [range.begin, range.end) of a tile lie; only pages of keys that may be seen are looked up.
  void locate_tokens(Tokens<KV>& tokens, int32_t tile, KeyRange range) const {
    const LevelParams& level = p_->level;
    const int64_t row = level.row_begin[request_];
    int32_t page = (tile + range.begin) / level.page_size;
    int32_t offset = (tile + range.begin) % level.page_size;
    const auto* k_head = static_cast<const KV*>(p_->k) + kv_head_ * p_->k_stride_head;
    const auto* v_head = static_cast<const KV*>(p_->v) + kv_head_ * p_->v_stride_head;
    tokens.begin = range.begin;
    tokens.end = range.end;
    for (int i = range.begin; i < range.end; ++page, offset = 0) {
      const int64_t id = level.indices
                             ? level.indices[row + int64_t(page) * level.index_step] / level.index_divisor
                             : row + page;
      const KV* key = k_head + id * p_->k_stride_page + offset * p_->k_stride_token;
      const KV* value = v_head + id * p_->v_stride_page + offset * p_->v_stride_token;
      const int stop = i + std::min(range.end - i, level.page_size - offset);
      for (; i < stop; ++i, key += p_->k_stride_token, value += p_->v_stride_token) {
        tokens.k[i] = key;
        tokens.v[i] = value;
      }
    }
  }

  // Dot products of `count` rows become probabilities relative to their running maxima.
  template <class F>
  void soften_rows(int first, int count, int32_t tile, F& ahead) {
    for (int r = first; r < first + count; ++r) {
      float* s = s_ + r * kKeyTile;
      // A negative scale would turn the order of the logits around.
      const bool plain = !Variant::has_transform(*p_) && logit_scale_ > 0.0f;
      if (!plain) transform_row(r, tile);
      alpha_[r] = soften(s, visible_[r], plain ? logit_scale_ * kLog2E : kLog2E, softmax_[r]);
      ahead.step();
    }
  }

  void transform_row(int r, int32_t tile) {
    IVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int k = 0; k < kKeyTile; k += kLanes) {
      float* s = s_ + r * kKeyTile + k;
      const LogitIndexOf<IVec> index{request_,          token_[r],   q_pos0_ + token_[r],
                                     lane + (tile + k), qo_head_[r], kv_head_};
      Vec x = load(s) * logit_scale_;
      if (Variant::has_transform(*p_)) x = Variant::template logits_transform<VecMath>(*p_, x, index);
      store(s, x);
    }
  }

  void emit(int32_t partial, float* o, const float* lse) {
    if (partial < 0) return write_output(o, lse);
    for (int r = 0; r < rows_; ++r) {
      const int64_t at = int64_t(partial + r) * header_->num_kv_heads + kv_head_;
      p_->partial_lse[at] = lse[r];
      copy_row(o + r * o_stride_, p_->partial_out + at * p_->head_dim_v);
    }
  }

  void copy_row(const float* from, float* to) const {
    std::memcpy(to, from, sizeof(float) * size_t(p_->head_dim_v));
  }

  void write_output(float* o, const float* lse) {
    for (int r = 0; r < rows_; ++r) {
      const int64_t token = token0_ + token_[r];
      const int32_t head = qo_head_[r];
      float total = lse[r];
      const float factor = total == kEmpty ? 0.0f : Variant::finish(*p_, head, kv_head_, total);
      if (p_->lse) p_->lse[token * p_->lse_stride_token + head * p_->lse_stride_head] = total;
      O* to = static_cast<O*>(p_->out) + token * p_->out_stride_token + head * p_->out_stride_head;
      const float* from = o + r * o_stride_;
      for (int d = 0; d < p_->head_dim_v; d += kLanes) {
        const Vec v = load(from + d) * factor;
        const int n = p_->head_dim_v - d;
        n >= kLanes ? store_float(to + d, v) : store_float(to + d, v, n);
      }
    }
  }

  // The last item of a merge unit folds the unit's parts in the plan's order.
  void arrive() {
    const int32_t index = item_->unit;
    const MergeUnit& unit = reinterpret_cast<const MergeUnit*>(p_->plan + p_->layout.units)[index];
    std::atomic_ref<int32_t> arrivals(p_->counters[1 + int64_t(index) * header_->num_kv_heads + kv_head_]);
    if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 != unit.num_items) return;
    arrivals.store(0, std::memory_order_relaxed);
    locate(unit.request, unit.q_begin, unit.q_rows);
    const auto* parts = reinterpret_cast<const int32_t*>(p_->plan + p_->layout.parts);
    std::fill_n(fold_lse_, rows_, kEmpty);
    std::fill_n(fold_, rows_ * o_stride_, 0.0f);
    for (int32_t part = unit.parts_begin; part < unit.parts_end; ++part) {
      for (int r = 0; r < rows_; ++r) {
        const int64_t at = int64_t(parts[part] + r) * header_->num_kv_heads + kv_head_;
        copy_row(p_->partial_out + at * p_->head_dim_v, o_);
        std::fill(o_ + p_->head_dim_v, o_ + o_stride_, 0.0f);
        merge_into(fold_ + r * o_stride_, fold_lse_[r], o_, p_->partial_lse[at], o_stride_);
      }
    }
    write_output(fold_, fold_lse_);
  }

  using O = Q;

  const AttentionParams* p_ = nullptr;
  const PlanHeader* header_ = nullptr;
  const WorkItem* item_ = nullptr;
  Arena arena_;
  int dim_capacity_ = 0, dim_v_capacity_ = 0, o_stride_ = 0;
  float *s_ = nullptr, *o_ = nullptr, *fold_ = nullptr;
  VectorTile<Q, KV> vector_;
#if defined(FI_AMX)
  AmxTile<KV> amx_;
#endif

  int32_t request_ = 0, kv_head_ = 0, rows_ = 0, kv_len_ = 0, q_pos0_ = 0;
  int64_t token0_ = 0;
  KeyRange keys_{};  // hull of what the rows may see
  float logit_scale_ = 0.0f;
  int32_t token_[kMaxQueryTile];  // of the request
  int32_t qo_head_[kMaxQueryTile];
  KeyRange row_keys_[kMaxQueryTile];
  uint64_t visible_[kMaxQueryTile];  // of the current tile
  RunningSoftmax softmax_[kMaxQueryTile];
  float alpha_[kMaxQueryTile];
  float lse_[kMaxQueryTile], fold_lse_[kMaxQueryTile];
  Tokens<KV> tokens_[2];  // of this tile and of the next one
};

}  // namespace fi::cpu
