// SPDX-License-Identifier: Apache-2.0
#include "dtype.h"
#include "ops.h"

namespace fi::cpu {
namespace {

// Below this many elements waking threads costs more than it saves.
constexpr int64_t kSerialElements = 1 << 15;

template <class From, class To>
void copy_rows(const AppendSide& s, const AppendParams& p, int num_threads) {
  const auto* from = static_cast<const From*>(s.from);
  auto* to = static_cast<To*>(s.to);
#pragma omp parallel for num_threads(num_threads)
  for (int64_t token = 0; token < p.num_slots; ++token) {
    const int64_t slot = p.slots[token];
    if (slot < 0) continue;
    To* page = to + slot / p.page_size * s.to_stride_page + slot % p.page_size * s.to_stride_token;
    for (int64_t head = 0; head < p.num_heads; ++head) {
      const From* x = from + token * s.from_stride_token + head * s.from_stride_head;
      To* y = page + head * s.to_stride_head;
      const float scale = s.scale[head * s.scale_stride];
      if (std::is_same_v<From, To> && scale == 1.0f) {
        std::memcpy(static_cast<void*>(y), static_cast<const void*>(x), size_t(s.dim) * sizeof(To));
        continue;
      }
      for (int64_t d = 0; d < s.dim; d += kLanes) {
        const int n = int(s.dim - d < kLanes ? s.dim - d : kLanes);
        if (n == kLanes)
          store_float(y + d, load_as_float(x + d) / scale);
        else
          store_float(y + d, load_as_float(x + d, n) / scale, n);
      }
    }
  }
}

template <class From>
void copy_from(const AppendSide& s, const AppendParams& p, int num_threads) {
  switch (s.to_dtype) {
    case Dtype::float32:
      return copy_rows<From, dtype::float32>(s, p, num_threads);
    case Dtype::float16:
      return copy_rows<From, dtype::float16>(s, p, num_threads);
    case Dtype::bfloat16:
      return copy_rows<From, dtype::bfloat16>(s, p, num_threads);
    case Dtype::float8_e4m3fn:
      return copy_rows<From, dtype::float8_e4m3fn>(s, p, num_threads);
    case Dtype::float8_e5m2:
      return copy_rows<From, dtype::float8_e5m2>(s, p, num_threads);
  }
}

}  // namespace

void append_kv(const AppendParams& p, int num_threads) {
  for (const AppendSide& s : p.side) {
    const int threads = p.num_slots * p.num_heads * s.dim < kSerialElements ? 1 : num_threads;
    if (s.from_dtype == Dtype::float32)
      copy_from<dtype::float32>(s, p, threads);
    else if (s.from_dtype == Dtype::float16)
      copy_from<dtype::float16>(s, p, threads);
    else
      copy_from<dtype::bfloat16>(s, p, threads);
  }
}

}  // namespace fi::cpu
