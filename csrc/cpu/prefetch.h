// SPDX-License-Identifier: Apache-2.0
// Asks for the keys and values of a later tile while one is computed.
#pragma once
#include <algorithm>
#include <cstdint>

#include "tokens.h"

namespace fi::cpu {

// A core has 16 or so outstanding misses: requests in a burst would stall it, and between bursts the memory
// would idle, so that they are spread evenly over the steps between which an engine computes.
template <class KV>
class Prefetcher {
 public:
  // k_size, v_size: elements of a token that follow each other, of one head or of several. steps: how often
  // step() will be called.
  Prefetcher(const Tokens<KV>& tokens, int64_t k_size, int64_t v_size, int64_t steps)
      : tokens_(&tokens),
        token_(tokens.begin),
        k_bytes_(k_size * int64_t(sizeof(KV))),
        v_bytes_(v_size * int64_t(sizeof(KV))) {
    const int64_t lines = ((k_bytes_ + 63) / 64 + (v_bytes_ + 63) / 64) * (tokens.end - tokens.begin);
    // The few that rounding leaves out come with their neighbours or on demand.
    lines_a_step_ = steps > 0 ? std::max<int64_t>(1, lines / steps) : 0;
    start_run();
  }

  void step() {
    for (int64_t budget = lines_a_step_; budget > 0 && at_ != nullptr;) {
      for (; budget > 0 && at_ < stop_; at_ += 64, --budget) request(at_);
      if (at_ >= stop_) next_run();
    }
  }

 private:
  // Keys and values of a token by turns: where they are neighbours, addresses ascend.
  void next_run() {
    if (values_) ++token_;
    values_ = !values_;
    start_run();
  }

  void start_run() {
    if (token_ >= tokens_->end) {
      at_ = nullptr;
      return;
    }
    at_ = reinterpret_cast<const char*>(values_ ? tokens_->v[token_] : tokens_->k[token_]);
    stop_ = at_ + (values_ ? v_bytes_ : k_bytes_);
  }

  // To the second cache level. The compiler drops its own prefetch where a loop has no other effect.
  static void request(const char* p) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" ::"m"(*p));
#else
    __builtin_prefetch(p, 0, 2);
#endif
  }

  const Tokens<KV>* tokens_;
  int token_;
  bool values_ = false;
  const char* at_ = nullptr;
  const char* stop_ = nullptr;
  int64_t k_bytes_, v_bytes_;
  int64_t lines_a_step_;
};

}  // namespace fi::cpu
