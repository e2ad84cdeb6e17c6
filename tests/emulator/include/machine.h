// SPDX-License-Identifier: Apache-2.0
// A grid of thread blocks on one host thread. Every thread is a fiber that runs until it has to wait. Which
// warp runs next, and when an asynchronous copy or product takes place, is drawn from a seed, so that a wait
// that is missing shows in the results.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.h"

namespace fi::emulator {

inline constexpr int kWarpSize = 32;
// Addresses of shared memory begin above 0, as a null address must be seen to be wrong.
inline constexpr uint32_t kSharedBase = 1024;
inline constexpr size_t kStackBytes = 256 * 1024;

class Machine;

// What a lane hands to the other lanes of its warp at an instruction that all of them execute.
struct Posted {
  uint32_t words[8];
  void* pointers[2];
};

struct Fiber {
  enum State { kReady, kAtWarp, kBlocked, kDone };
  Context context;
  State state = kReady;
};

// An instruction of a whole warp under way: what its lanes posted, and what each gets back.
struct Meeting {
  const char* kind = nullptr;
  int arrived = 0;
  Posted posted[kWarpSize];
  float floats[kWarpSize][8];
  uint32_t words[kWarpSize][4];
};

struct Warp {
  Fiber lanes[kWarpSize];
  Meeting meetings[2];  // by turns, so that one is read while lanes arrive at the next
  int turns[kWarpSize] = {};
  std::deque<std::vector<std::function<void()>>>
      groups;          // committed products, and those being collected last
  uint64_t awake = 0;  // sleeps until then
};

struct Copy {
  char* to;
  const char* from;
  uint32_t bytes;        // of 16; the rest is zeros
  uint32_t barrier = 0;  // not 0: arrive there instead of copying
};

struct Block {
  int index = 0;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  struct Named {
    int arrived = 0, expected = 0;
    bool said = false, any = false;  // by those that have arrived; by those of the last round
    std::vector<Fiber*> waiting;
  } named[16];
  std::unordered_map<uint32_t, std::vector<Fiber*>> waiting;  // at mbarriers
  std::vector<std::deque<Copy>> copies;                       // of each thread
  std::vector<int> copying;                                   // threads that have some
  struct AsyncProxy {
    bool wrote, waited;  // since the last fence: by stmatrix, at an mbarrier
    bool uncommitted;    // a bulk copy that no wait waits for
  };
  std::vector<AsyncProxy> async;  // of each thread
};

// An mbarrier as it lies in shared memory.
struct Mbarrier {
  uint16_t expected, pending;
  uint32_t phase : 1, tag : 31;  // tag: initialised
};
static_assert(sizeof(Mbarrier) == 8);
inline constexpr uint32_t kMbarrierTag = 0x2badcafe;

class Machine {
 public:
  // The thread that runs.
  Block* block = nullptr;
  Warp* warp = nullptr;
  int thread = 0, lane = 0;

  static Machine& get() {
    static Machine machine;
    return machine;
  }

  // Runs `kernel` in each thread of `blocks` blocks. Throws when threads wait for ever, when lanes meet in
  // different instructions, and at addresses that do not exist.
  void run(int blocks, int threads, size_t shared_bytes, uint64_t seed, const std::function<void()>& kernel);

  [[noreturn]] void fail(const std::string& what) {
    error_ = what + " (block " + std::to_string(block->index) + ", thread " + std::to_string(thread) + ")";
    fiber().state = Fiber::kDone;
    leave();
    __builtin_unreachable();
  }

  Fiber& fiber() { return warp->lanes[lane]; }
  uint32_t random(uint32_t below) { return uint32_t(random_() % below); }

  // Global memory that __ldg may read; all of it where nothing is said.
  struct Range {
    const void* begin;
    int64_t bytes;
  };
  std::vector<Range> readable;
  void check_read(const void* from, size_t bytes) {
    bool found = readable.empty();
    for (const Range& r : readable) {
      const int64_t at = static_cast<const char*>(from) - static_cast<const char*>(r.begin);
      found |= at >= 0 && at + int64_t(bytes) <= r.bytes;
    }
    if (!found || reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("global memory: a read outside of it");
  }

  char* at(uint32_t address, uint32_t bytes) {
    if (address < kSharedBase || address % bytes != 0 || address + bytes > kSharedBase + block->shared_bytes)
      fail("shared memory: address " + std::to_string(address) + " of " + std::to_string(bytes) + " bytes");
    return block->shared + (address - kSharedBase);
  }

  // All lanes of the warp come here with the same `kind`; the last one calls `act`. Returns the meeting.
  template <class Act>
  Meeting& meet(const char* kind, const Posted& mine, const Act& act) {
    Meeting& m = warp->meetings[warp->turns[lane]++ % 2];
    if (m.arrived == 0) m.kind = kind;
    if (m.kind != kind) fail(std::string("lanes of a warp meet in ") + m.kind + " and in " + kind);
    m.posted[lane] = mine;
    if (++m.arrived < kWarpSize) {
      fiber().state = Fiber::kAtWarp;
      leave();
      return m;
    }
    m.arrived = 0;
    act(m);
    for (Fiber& f : warp->lanes)
      if (f.state == Fiber::kAtWarp) f.state = Fiber::kReady;
    return m;
  }
  void sync_warp() {
    meet("syncwarp", {}, [](Meeting&) {});
  }

  // Returns whether one of the threads or more said so.
  bool named_barrier(int id, int threads, bool said = false) {
    Block::Named& b = block->named[id];
    if (b.arrived == 0) b.expected = threads;
    if (b.expected != threads) fail("barrier " + std::to_string(id) + ": two numbers of threads");
    b.said |= said;
    if (++b.arrived < threads) {
      b.waiting.push_back(&fiber());
      suspend();
    } else {
      b.any = b.said;
      b.arrived = 0, b.said = false;
      wake(b.waiting);
    }
    return b.any;
  }

  Mbarrier& mbarrier(uint32_t address) {
    auto& b = *reinterpret_cast<Mbarrier*>(at(address, 8));
    if (b.tag != (kMbarrierTag & 0x7fffffff)) fail("mbarrier: not initialised");
    return b;
  }
  void mbarrier_init(uint32_t address, int arrivals) {
    *reinterpret_cast<Mbarrier*>(at(address, 8)) = {uint16_t(arrivals), uint16_t(arrivals), 0,
                                                    kMbarrierTag & 0x7fffffff};
  }
  void mbarrier_arrive(uint32_t address) {
    Mbarrier& b = mbarrier(address);
    if (b.pending == 0) fail("mbarrier: more arrivals than it has");
    if (--b.pending > 0) return;
    b.pending = b.expected;
    b.phase ^= 1;
    wake(block->waiting[address]);
  }
  void mbarrier_wait(uint32_t address, uint32_t parity) {
    while (mbarrier(address).phase == parity) {
      block->waiting[address].push_back(&fiber());
      suspend();
    }
    async_of(lane).waited = true;
  }

  void copy(const Copy& c) {
    auto& queue = block->copies[size_t(thread)];
    if (queue.empty()) block->copying.push_back(thread);
    queue.push_back(c);
  }
  // A bulk copy of 16 bytes from shared memory, which its warp has written.
  void bulk_store(char* to, uint32_t from) {
    for (int i = 0; i < kWarpSize; ++i)
      if (async_of(i).wrote) fail("bulk copy: a lane has written without a fence");
    async_of(lane).uncommitted = true;
    copy({to, at(from, 16), 16});
  }
  // By all lanes of the warp.
  void note_writes() {
    for (int i = 0; i < kWarpSize; ++i) async_of(i).wrote = true;
  }
  void fence_async() { async_of(lane).wrote = async_of(lane).waited = false; }
  // By all lanes of the warp, of which wgmma reads what others have copied.
  void check_fence() {
    for (int i = 0; i < kWarpSize; ++i)
      if (async_of(i).waited) fail("wgmma: a lane has waited at an mbarrier without a fence");
  }
  void bulk_commit() { async_of(lane).uncommitted = false; }
  // Lets all copies of this thread land.
  void bulk_wait() {
    if (async_of(lane).uncommitted) fail("bulk copy: waited for, but not committed");
    auto& queue = block->copies[size_t(thread)];
    if (queue.empty()) return;
    land(queue, queue.size());
    std::erase(block->copying, thread);
  }

 private:
  friend struct Block;
  Block::AsyncProxy& async_of(int of_lane) { return block->async[size_t(thread - lane + of_lane)]; }
  static void enter() {
    (*get().kernel_)();
    if (get().reads_shared()) get().fail("bulk copy: its thread has ended");
    get().fiber().state = Fiber::kDone;
    get().leave();
  }

  // Whether copies of this thread from shared memory are under way.
  bool reads_shared() const {
    for (const Copy& c : block->copies[size_t(thread)])
      if (!c.barrier && c.from >= block->shared && c.from < block->shared + block->shared_bytes) return true;
    return false;
  }

  void suspend() {
    fiber().state = Fiber::kBlocked;
    leave();
  }
  static void wake(std::vector<Fiber*>& fibers) {
    for (Fiber* f : fibers) f->state = Fiber::kReady;
    fibers.clear();
  }

  void leave() { fiber().context.switch_to(main_); }

  // Lets the lanes of a warp run until all of them wait, and on for some while if they only wait for each
  // other. Returns whether any ran.
  bool run_warp(Block& b, size_t which) {
    block = &b;
    warp = b.warps[which].get();
    bool any = false;
    do {
      bool ran = false;
      const int first = int(random(kWarpSize));
      for (int i = 0; i < kWarpSize; ++i) {
        lane = (first + i) % kWarpSize;
        if (fiber().state != Fiber::kReady) continue;
        thread = int(which) * kWarpSize + lane;
        main_.switch_to(fiber().context);
        if (!error_.empty()) throw std::runtime_error(error_);
        ran = true;
      }
      if (!ran) break;
      any = true;
    } while (random(8) != 0);
    return any;
  }

  // Lets the first `count` copies of a thread land, or all that there are.
  void land(std::deque<Copy>& queue, size_t count) {
    for (; count > 0 && !queue.empty(); --count) {
      const Copy c = queue.front();
      queue.pop_front();
      if (c.barrier) {
        mbarrier_arrive(c.barrier);
      } else {
        std::memset(c.to, 0, 16);
        std::memcpy(c.to, c.from, c.bytes);
      }
    }
  }

  // Lets some copies of one thread land. Returns false where there are none.
  bool land(Block& b) {
    if (b.copying.empty()) return false;
    block = &b;
    const size_t pick = random(uint32_t(b.copying.size()));
    auto& queue = b.copies[size_t(b.copying[pick])];
    land(queue, 1 + random(16));
    if (queue.empty()) {
      b.copying[pick] = b.copying.back();
      b.copying.pop_back();
    }
    return true;
  }

  const std::function<void()>* kernel_ = nullptr;
  std::minstd_rand random_;
  std::string error_;
  Context main_;
};

inline void Machine::run(int blocks, int threads, size_t shared_bytes, uint64_t seed,
                         const std::function<void()>& kernel) {
  kernel_ = &kernel;
  random_.seed(seed + 1);
  error_.clear();
  const size_t stacks = size_t(blocks) * size_t(threads) * kStackBytes;
  const size_t shared_each = (shared_bytes + 1023) / 1024 * 1024 + 1024;
  const size_t bytes = stacks + size_t(blocks) * shared_each;
  char* memory = static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for the fibers");
  const std::unique_ptr<char, std::function<void(char*)>> owner(memory, [&](char* p) { munmap(p, bytes); });
  std::vector<Block> all(static_cast<size_t>(blocks));
  char* stack = memory;
  for (int i = 0; i < blocks; ++i) {
    Block& b = all[size_t(i)];
    b.index = i;
    b.shared = memory + stacks + size_t(i) * shared_each;
    b.shared += (1024 - reinterpret_cast<uintptr_t>(b.shared) % 1024) % 1024;
    b.shared_bytes = shared_bytes;
    std::memset(b.shared, 0xff, shared_bytes);  // NaN of any type
    b.copies.resize(size_t(threads));
    b.async.resize(size_t(threads));
    for (int w = 0; w < threads / kWarpSize; ++w) {
      auto& warp_of = b.warps.emplace_back(std::make_unique<Warp>());
      for (Fiber& f : warp_of->lanes) {
        f.context.prepare(stack, kStackBytes, &Machine::enter);
        stack += kStackBytes;
      }
    }
  }
  std::vector<std::pair<Block*, size_t>> running;
  for (Block& b : all)
    for (size_t w = 0; w < b.warps.size(); ++w) running.emplace_back(&b, w);
  const auto done = [](const Warp& w) {
    for (const Fiber& f : w.lanes)
      if (f.state != Fiber::kDone) return false;
    return true;
  };
  int idle = 0;  // looks in vain in a row
  uint64_t now = 0;
  while (!running.empty()) {
    Block& any = all[random(uint32_t(blocks))];
    bool progress = random(2) == 0 && land(any);
    const size_t pick = random(uint32_t(running.size()));
    // Now and then a warp falls behind all others, wherever it stands.
    Warp& picked = *running[pick].first->warps[running[pick].second];
    if (picked.awake <= ++now) {
      progress |= run_warp(*running[pick].first, running[pick].second);
      if (random(16) == 0) picked.awake = now + 32 * running.size();
    }
    if (done(*running[pick].first->warps[running[pick].second])) {
      running[pick] = running.back();
      running.pop_back();
    }
    if (progress) {
      idle = 0;
    } else if (++idle > 64) {  // look everywhere
      bool found = false;
      for (auto& [b, w] : running) found |= run_warp(*b, w);
      for (Block& b : all) found |= land(b);
      if (!found) throw std::runtime_error("threads wait for something that never comes");
      idle = 0;
      std::erase_if(running, [&](const auto& r) { return done(*r.first->warps[r.second]); });
    }
  }
  for (Block& b : all)
    while (land(b)) {
    }
}

}  // namespace fi::emulator
