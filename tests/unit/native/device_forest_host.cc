// SPDX-License-Identifier: Apache-2.0
// The device's search for prefixes on an emulated cluster of thread blocks.
#include <cstring>
#include <memory>
#include <vector>

#include "bind/page_rows_args.h"
#include "bind/planner_config.h"
#include "core/device_levels.h"
#include "core/forest.h"
#include "fiber_block.h"

namespace fi::test {
namespace {

using namespace bind;

template <class Block>
struct Memory {
  typename GroupScan<Block>::Slots slots;
  union {
    ForestMemory leaders;
    LevelsMemory choosing;
  };
  ForestNodesMemory sorting;
  Comparison received[kForestRequests];
  Inbox inbox;
  ForestNodes nodes;
  Levels levels;
};

// nodes: int32 [requests, 5]; members: int32, max_depth a request; size: int64 [2].
template <int kThreads, int kCtas>
void find(TensorView config, TensorView qo_indptr, TensorView kv_lens, TensorView indices,
          TensorView row_begin, TensorView row_end, int64_t step, int64_t page_size,
          Optional<TensorView> limits, int64_t max_depth, TensorView nodes, TensorView members,
          TensorView size, int64_t seed) {
  using Block = FiberBlock<kThreads, kCtas>;
  using Thread = typename Block::Thread;
  const PlannerConfig c = read_config(config);
  const int32_t requests = int32_t(kv_lens.size(0));
  alignas(16) static int32_t exchange[kExchangeWords];
  std::memset(exchange, int(seed % 251), sizeof(exchange));
  const DeviceForestArgs args{page_rows(indices, row_begin, row_end, step, kHost), int32_t(page_size),
                              int32_t(max_depth),
                              limits.has_value() ? data<const int32_t>(limits.value()) : nullptr, exchange};
  static const auto block = std::make_unique<Block>();
  static const auto memory = std::make_unique<Memory<Thread>[]>(kCtas);
  std::memset(static_cast<void*>(memory.get()), int(seed % 251), kCtas * sizeof(Memory<Thread>));
  const auto* starts = data<const int32_t>(qo_indptr);
  const auto* lens = data<const int32_t>(kv_lens);
  int32_t count = 0, considered = 0;
  const auto body = [&](Thread& thread) {
    Memory<Thread>& m = memory[size_t(thread.cta())];
    GroupScan<Thread> scan(thread, m.slots);
    ForestFinder<Thread, (kCtas > 1)> finder(thread, scan, args, m.leaders, m.sorting.pairs, m.received,
                                             m.inbox);
    const int32_t pairs = finder.run(c, requests, starts, lens, [&](auto between) {
      thread.sync();
      between();
      thread.sync();
    });
    finder.leave();
    if (thread.cta() != 0) return;
    NodeCount found{};
    if (pairs > 0)
      found = ForestNodeBuilder<Thread, GroupScan<Thread>>(thread, scan, m.leaders, finder.num_requests(),
                                                           m.sorting, m.nodes, m.levels.path)
                  .run(pairs, finder.wide(), args.max_depth, [] {}, [](auto) {});
    count = found.nodes;
    considered = finder.num_requests();
    if (count > 0)
      LevelChooser<Thread>(thread, scan, m.nodes, count, considered, args.page_size, m.choosing, m.levels)
          .keep_all(c, found);
  };
  try {
    block->run(body, uint64_t(seed));
  } catch (const std::runtime_error& e) {
    TVM_FFI_THROW(RuntimeError) << e.what();
  }
  const Levels& l = memory[0].levels;
  int32_t total = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t first = total;
    for (int32_t r = 0; r < considered; ++r)
      if (l.path[l.level(i)][r] == i) data<int32_t>(members)[total++] = r;
    data<ForestNode>(nodes)[i] = {l.parent[i], l.begin(i), l.end[i], first, total};
  }
  data<int64_t>(size)[0] = count;
  data<int64_t>(size)[1] = total;
}

}  // namespace
}  // namespace fi::test

TVM_FFI_DLL_EXPORT_TYPED_FUNC(find_128_1, (fi::test::find<128, 1>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(find_64_3, (fi::test::find<64, 3>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(find_512_2, (fi::test::find<512, 2>));
