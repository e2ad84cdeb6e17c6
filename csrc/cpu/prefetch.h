// SPDX-License-Identifier: Apache-2.0
// Asks for the keys and values of the next tile while the current one is computed.
#pragma once
#include <cstdint>

#include "microkernels.h"

namespace fi::cpu {

// Row pointers of the keys [begin, end) of a tile.
template <class KV>
struct Tokens {
  int begin = 0, end = 0;
  const KV* k[kKeyTile];
  const KV* v[kKeyTile];
};

// A core has 16 or so outstanding misses: requests in one burst would stall it, so that they have to be
// spread over the computation. An engine calls step() about kKeyTile times a tile, each asks for one token.
template <class KV>
class Prefetcher {
 public:
  Prefetcher(const Tokens<KV>& tokens, int dim, int dim_v)
      : tokens_(tokens),
        token_(tokens.begin),
        k_bytes_(dim * int64_t(sizeof(KV))),
        v_bytes_(dim_v * int64_t(sizeof(KV))) {}

  void step() {
    if (token_ >= tokens_.end) return;
    lines(tokens_.k[token_], k_bytes_);
    lines(tokens_.v[token_], v_bytes_);
    ++token_;
  }

  void finish() {
    while (token_ < tokens_.end) step();
  }

 private:
  // To the second cache level. The compiler drops its own prefetch where a loop has no other effect.
  static void request(const char* p) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" ::"m"(*p));
#else
    __builtin_prefetch(p, 0, 2);
#endif
  }

  static void lines(const KV* row, int64_t bytes) {
    const auto* at = reinterpret_cast<const char*>(row);
    for (const char* stop = at + bytes; at < stop; at += 64) request(at);
  }

  const Tokens<KV>& tokens_;
  int token_;
  int64_t k_bytes_, v_bytes_;
};

}  // namespace fi::cpu
