// SPDX-License-Identifier: Apache-2.0
// How the functors of a variant that transform queries, keys and values are called.
#pragma once
#include <algorithm>

#include "../core/variant.h"
#include "microkernels.h"

namespace fi::cpu {

// The keys tile + key .. of a request, one in each lane, and how their elements are dequantised.
class KeyLanes {
 protected:
  KeyLanes(const AttentionParams& p, int32_t request, int32_t kv_head, int32_t tile, float scale)
      : p_(p), request_(request), kv_head_(kv_head), tile_(tile), scale_(scale) {}

  auto loader(const float* elements) const {
    return [elements, scale = scale_](int32_t d) { return load(elements + d * kLanes) * scale; };
  }

  KeyIndexOf<IVec> index_of(int key) const {
    IVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return {request_, lane + (tile_ + key), kv_head_};
  }

  const AttentionParams& p_;
  int32_t request_, kv_head_, tile_;
  float scale_;
};

// What VectorTile::transform_keys() asks for: element d of the keys from `key` on.
template <class Variant>
class KeyTransform : KeyLanes {
 public:
  KeyTransform(const AttentionParams& p, int32_t request, int32_t kv_head, int32_t tile)
      : KeyLanes(p, request, kv_head, tile, p.k_scale ? p.k_scale[kv_head * p.k_scale_stride] : 1.0f) {}

  void begin(const float* elements, int key) {
    row_ = Variant::template key_row<Vec>(p_, loader(elements), index_of(key));
  }

  Vec operator()(const float* elements, int d, int key) const {
    return Variant::template key_transform<Vec>(p_, loader(elements), d, index_of(key), row_);
  }

 private:
  Vec row_{};
};

// What VectorTile::transform_values() asks for.
template <class Variant>
class ValueTransform : KeyLanes {
 public:
  ValueTransform(const AttentionParams& p, int32_t request, int32_t kv_head, int32_t tile)
      : KeyLanes(p, request, kv_head, tile, p.v_scale ? p.v_scale[kv_head * p.v_scale_stride] : 1.0f) {}

  Vec operator()(const float* elements, int d, int key) const {
    return Variant::template value_transform<Vec>(p_, loader(elements), d, index_of(key));
  }
};

template <class Variant>
void transform_query(const AttentionParams& p, const RowIndex& index, float* row) {
  float from[512];  // AttentionSpec's limit
  const int dim = std::min(p.head_dim, 512);
  std::copy_n(row, dim, from);
  const auto loader = [&](int32_t d) { return from[d]; };
  const float whole = Variant::query_row(p, loader, index);
  for (int d = 0; d < dim; ++d) row[d] = Variant::query_transform(p, loader, d, index, whole);
}

}  // namespace fi::cpu
