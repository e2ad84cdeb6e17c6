// SPDX-License-Identifier: Apache-2.0
// A CUDA thread block, or a cluster of them, on one host thread: every thread is a fiber that runs until it
// meets a barrier. Which fiber runs next is drawn from a seed, so that a missing barrier shows in the
// results.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace fi::test {

// What the first block of a run did. cluster_barriers: and waits for what others send. warp_steps: operations
// of whole warps, of the warp with most of them between two barriers. atomics: operations on memory that
// other threads change too, of all threads.
struct BlockCounts {
  int64_t block_barriers = 0, cluster_barriers = 0, warp_steps = 0, atomics = 0;
};

template <int kBlockThreads, int kCtas = 1>
class FiberBlock {
 public:
  static constexpr int kThreads = kBlockThreads, kFibers = kThreads * kCtas;

  class Thread;

  // Runs `body` once in each thread. Throws when threads wait for ever or meet at different barriers.
  void run(const std::function<void(Thread&)>& body, uint64_t seed) {
    body_ = &body;
    random_.seed(seed);
    stacks_.resize(size_t(kFibers) * kStackBytes);
    fibers_.assign(kFibers, {});
    warps_.assign(kFibers / 32, {});
    ctas_.assign(kCtas, {});
    waiting_ = done_ = opened_ = 0;
    waits_for_inboxes_.clear();
    counts_ = {};
    ready_.clear();  // what a run that failed has left
    error_.clear();
    for (int t = 0; t < kFibers; ++t) {
      ucontext_t& context = fibers_[size_t(t)].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks_.data() + size_t(t) * kStackBytes;
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = &scheduler_;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(&context, reinterpret_cast<void (*)()>(&FiberBlock::start), 3, uint32_t(self >> 32),
                  uint32_t(self), t);
      ready_.push_back(t);
    }
    while (!ready_.empty()) {
      const size_t pick = random_() % ready_.size();
      running_ = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      swapcontext(&scheduler_, &fibers_[size_t(running_)].context);
      if (!error_.empty()) throw std::runtime_error(error_);
    }
    if (done_ != kFibers) throw std::runtime_error("some threads wait for a barrier that others never reach");
    end_interval();
  }

  const BlockCounts& counts() const { return counts_; }

  class Thread {
   public:
    static constexpr int kThreads = kBlockThreads;
    Thread(FiberBlock& block, int fiber) : block_(block), thread_(fiber % kThreads), cta_(fiber / kThreads) {}

    int thread() const { return thread_; }
    int cta() const { return cta_; }
    int ctas() const { return kCtas; }
    void sync() { block_.wait_block(); }
    void sync_cluster() { block_.wait_cluster(); }
    // A value is cleared two calls before it is used again, when all have read it.
    bool sync_or(bool v) {
      bool (&any)[4] = block_.ctas_[size_t(cta_)].any;
      const int call = calls_++ % 4;
      any[(call + 2) % 4] = false;
      any[call] |= v;
      block_.wait_block();
      return any[call];
    }
    void sync_warp() { exchange(kSync, 0); }
    uint32_t ballot(bool v) {
      const uint64_t* values = exchange(kBallot, v);
      uint32_t mask = 0;
      for (int i = 0; i < 32; ++i) mask |= uint32_t(values[i]) << i;
      return mask;
    }
    template <class T>
    T shuffle(T v, int lane) {
      return T(exchange(kShuffle, uint64_t(v))[lane & 31]);
    }
    template <class T>
    T shuffle_up(T v, int distance) {
      const int lane = thread_ % 32;
      return T(exchange(kShuffle, uint64_t(v))[lane < distance ? lane : lane - distance]);
    }
    uint32_t warp_sum(uint32_t v) {
      return reduce(kSum, v, [](uint32_t a, uint32_t b) { return a + b; });
    }
    uint32_t warp_max(uint32_t v) {
      return reduce(kMax, v, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    }
    uint32_t warp_or(uint32_t v) {
      return reduce(kOr, v, [](uint32_t a, uint32_t b) { return a | b; });
    }
    void add(uint32_t* to, uint32_t v) {
      count_atomic();
      *to += v;
    }
    void add(uint64_t* to, uint64_t v) {
      count_atomic();
      *to += v;
    }
    int32_t compare_and_swap(int32_t* to, int32_t expected, int32_t desired) {
      count_atomic();
      const int32_t was = *to;
      if (was == expected) *to = desired;
      return was;
    }
    void keep_least(int32_t* to, int32_t v) {
      count_atomic();
      *to = v < *to ? v : *to;
    }
    // What is copied is there only when it has been waited for.
    void copy_async(int32_t* to, const int32_t* from) { copies_.emplace_back(to, from); }
    void wait_copies() {
      for (const auto& [to, from] : copies_) *to = *from;
      copies_.clear();
    }
    template <class T>
    T load_exchanged(const T* from) {
      return *from;
    }
    template <class Box>
    void open_inbox(Box* box, uint32_t bytes) {
      Cta& cta = block_.ctas_[size_t(cta_)];
      cta.inbox = reinterpret_cast<char*>(box);
      cta.expected = bytes;
      ++block_.opened_;
      block_.wake(block_.waits_for_inboxes_, block_.opened_ == kFibers);
    }
    void wait_for_inboxes() {
      may_send_ = true;
      block_.wait_until(block_.waits_for_inboxes_, block_.opened_ == kFibers);
    }
    // Inboxes lie in the same place of each block's memory, and so does what is sent.
    template <class T, class Box>
    void send(T* to, const T& v, Box*, int cta) {
      Cta &there = block_.ctas_[size_t(cta)], &own = block_.ctas_[size_t(cta_)];
      if (!may_send_) block_.error_ = "a thread sends before it has waited for inboxes";
      if (there.ended > 0) block_.error_ = "a thread sends to a block that ends";
      *reinterpret_cast<T*>(there.inbox + (reinterpret_cast<char*>(to) - own.inbox)) = v;
      there.received += sizeof(T);
      if (there.received > there.expected) block_.error_ = "a block receives more than it has opened for";
      block_.wake(there.waiting_for_inbox, there.received == there.expected);
    }
    template <class Box>
    void receive(Box* box) {
      if (cta_ == 0 && thread_ == 0) ++block_.counts_.cluster_barriers;
      leave(box);
    }
    template <class Box>
    void leave(Box*) {
      Cta& cta = block_.ctas_[size_t(cta_)];
      block_.wait_until(cta.waiting_for_inbox, cta.received == cta.expected);
    }
    template <class T>
    void store(T* to, const T& v) {
      *to = v;
    }

   private:
    void count_atomic() { block_.counts_.atomics += cta_ == 0; }

    // Two halves by turns: one is written again only after all lanes have met in the other.
    const uint64_t* exchange(int kind, uint64_t v) {
      half_ ^= 1;
      return block_.wait_warp(kind, half_, v);
    }

    template <class F>
    uint32_t reduce(int kind, uint32_t v, F f) {
      const uint64_t* values = exchange(kind, v);
      for (int i = 0; i < 32; ++i) v = i == 0 ? uint32_t(values[0]) : f(v, uint32_t(values[i]));
      return v;
    }

    FiberBlock& block_;
    const int thread_, cta_;
    int half_ = 0, calls_ = 0;
    bool may_send_ = false;
    std::vector<std::pair<int32_t*, const int32_t*>> copies_;
  };

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  enum { kSync, kBallot, kShuffle, kSum, kMax, kOr };

  struct Fiber {
    ucontext_t context;
    bool at_cluster_barrier = false;
  };
  struct Cta {
    int waiting = 0, ended = 0;
    bool any[4] = {};
    char* inbox = nullptr;
    size_t received = 0, expected = 0;  // bytes
    std::vector<int> waiting_for_inbox;
  };
  struct Warp {
    int arrived = 0, kind = 0, steps = 0;
    uint64_t values[2][32];
  };

  static void start(uint32_t high, uint32_t low, int thread) {
    auto* self = reinterpret_cast<FiberBlock*>(uintptr_t(high) << 32 | low);
    Thread t(*self, thread);
    (*self->body_)(t);
    ++self->done_;
    ++self->ctas_[size_t(thread / kThreads)].ended;
    self->meet_cluster();
  }

  void suspend() { swapcontext(&fibers_[size_t(running_)].context, &scheduler_); }

  void wait_until(std::vector<int>& queue, bool now) {
    if (now) return;
    queue.push_back(running_);
    suspend();
  }

  void wake(std::vector<int>& queue, bool now) {
    if (!now) return;
    ready_.insert(ready_.end(), queue.begin(), queue.end());
    queue.clear();
  }

  // The first block is between two barriers, where its slowest warp counts.
  void end_interval() {
    int most = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      most = std::max(most, warps_[size_t(w)].steps);
      warps_[size_t(w)].steps = 0;
    }
    counts_.warp_steps += most;
  }

  void wait_block() {
    const int cta = running_ / kThreads;
    if (++ctas_[size_t(cta)].waiting == kThreads) {
      ctas_[size_t(cta)].waiting = 0;
      if (cta == 0) ++counts_.block_barriers;
      if (cta == 0) end_interval();
      for (int t = 0; t < kThreads; ++t) ready_.push_back(cta * kThreads + t);
    }
    suspend();
  }

  void wait_cluster() {
    ++waiting_;
    fibers_[size_t(running_)].at_cluster_barrier = true;
    meet_cluster();
    suspend();
  }

  // A barrier of the cluster does not wait for threads that have ended (PTX ISA, barrier.cluster).
  void meet_cluster() {
    if (waiting_ == 0 || waiting_ + done_ < kFibers) return;
    waiting_ = 0;
    ++counts_.cluster_barriers;
    end_interval();
    for (int t = 0; t < kFibers; ++t) {
      bool& waits = fibers_[size_t(t)].at_cluster_barrier;
      if (waits) ready_.push_back(t);
      waits = false;
    }
  }

  const uint64_t* wait_warp(int kind, int half, uint64_t v) {
    Warp& warp = warps_[size_t(running_ / 32)];
    if (warp.arrived == 0) warp.kind = kind;
    if (warp.kind != kind) error_ = "lanes of a warp meet in different operations";
    warp.values[half][running_ % 32] = v;
    if (++warp.arrived == 32) {
      warp.arrived = 0;
      ++warp.steps;
      for (int lane = 0; lane < 32; ++lane) ready_.push_back(running_ / 32 * 32 + lane);
    }
    suspend();
    return warp.values[half];
  }

  const std::function<void(Thread&)>* body_ = nullptr;
  std::minstd_rand random_;
  std::vector<char> stacks_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Cta> ctas_;
  std::vector<int> ready_;
  ucontext_t scheduler_{};
  std::string error_;
  BlockCounts counts_;
  std::vector<int> waits_for_inboxes_;
  int running_ = 0, waiting_ = 0, done_ = 0, opened_ = 0;
};

}  // namespace fi::test
