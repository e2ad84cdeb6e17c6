// SPDX-License-Identifier: Apache-2.0
// What the generated header of a user's variant is made with: how bodies that were written for one key are
// called for vectors of keys.
#pragma once
#include <type_traits>

#include "functions.h"
#include "variant.h"

namespace fi {

// A row of queries or of keys as a functor sees it: element d, or 0 outside of the row. A loader that says
// how many elements there are (kSize) spares code that asks.
template <class F, class Load>
struct RowView {
  const Load& load;
  int32_t dim;

  FI_DEVICE F operator[](int32_t d) const { return uint32_t(d) < uint32_t(size()) ? load(d) : F{}; }
  FI_DEVICE int32_t size() const {
    if constexpr (requires { Load::kSize; })
      return Load::kSize;
    else
      return dim;
  }
};

// body(logit, key position), of each lane where the body takes no vectors.
template <bool kVectorized, class F, class Int, class Body>
FI_DEVICE F for_logits(F logit, Int kv_pos, Body body) {
  if constexpr (kVectorized || std::is_same_v<F, float>) {
    return body(logit, kv_pos);
  } else {
    for (int i = 0; i < int(sizeof(F) / sizeof(float)); ++i)
      logit[i] = body(float(logit[i]), int32_t(kv_pos[i]));
    return logit;
  }
}

// body(row of keys, key position, what was computed of the whole row).
template <bool kVectorized, class F, class Load, class Int, class Body>
FI_DEVICE F for_keys(const Load& load, Int kv_pos, F whole, int32_t dim, Body body) {
  if constexpr (kVectorized || std::is_same_v<F, float>) {
    return body(RowView<F, Load>{load, dim}, kv_pos, whole);
  } else {
    F result;
    for (int i = 0; i < int(sizeof(F) / sizeof(float)); ++i) {
      const auto one = [&](int32_t d) { return float(load(d)[i]); };
      result[i] = body(RowView<float, decltype(one)>{one, dim}, int32_t(kv_pos[i]), float(whole[i]));
    }
    return result;
  }
}

}  // namespace fi
