// SPDX-License-Identifier: Apache-2.0
#include "../core/forest_host.h"

#include <limits>
#include <vector>

#include "page_rows_args.h"

namespace fi::bind {
namespace {

// shareable: int32 [requests]. nodes: int32 [requests, 5]; members: int32, max_depth a request; size: int64
// [2], nodes and members found.
void find_forest(TensorView indices, TensorView row_begin, TensorView row_end, int64_t step,
                 TensorView shareable, int64_t page_size, int64_t max_depth, TensorView nodes,
                 TensorView members, TensorView size) {
  const PageRows table = page_rows(indices, row_begin, row_end, step, kHost);
  const int64_t requests = row_begin.size(0);
  expect_vector("shareable", shareable, kInt32, requests);
  if (page_size < 1 || max_depth < 1 || requests * max_depth > std::numeric_limits<int32_t>::max())
    TVM_FFI_THROW(ValueError) << "page_size, max_depth: expected >= 1, and fewer than 2^31 members; got "
                              << page_size << ", " << max_depth << " for " << requests << " requests.";
  expect_shape("nodes", nodes, {requests, 5});
  expect_vector("members", members, kInt32, requests * max_depth);

  thread_local std::vector<int32_t> pages;
  pages.resize(size_t(requests));
  const auto* tokens = data<const int32_t>(shareable);
  for (int64_t r = 0; r < requests; ++r) {
    pages[size_t(r)] = int32_t(tokens[r] / page_size);
    if (tokens[r] < 0 || (pages[size_t(r)] > 0 && !holds_pages(table, int32_t(r), pages[size_t(r)])))
      TVM_FFI_THROW(ValueError) << "shareable[" << r << "]: expected 0 or more tokens whose pages the row ["
                                << table.row_begin[r] << ", " << table.row_end[r] << ") of the "
                                << table.num_indices << " indices holds; got " << tokens[r] << ".";
  }
  const ForestSize found = fi::find_forest(table, pages, int32_t(page_size), int32_t(max_depth),
                                           data<ForestNode>(nodes), data<int32_t>(members));
  data<int64_t>(size)[0] = found.nodes;
  data<int64_t>(size)[1] = found.members;
}

}  // namespace
}  // namespace fi::bind

TVM_FFI_DLL_EXPORT_TYPED_FUNC(find_forest, fi::bind::find_forest);
