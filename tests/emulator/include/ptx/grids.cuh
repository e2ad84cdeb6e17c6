// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fi::ptx {

inline void wait_for_grids() {}

}  // namespace fi::ptx
