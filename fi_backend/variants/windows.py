# SPDX-License-Identifier: Apache-2.0
"""Windows over the last keys, with the first ones kept as sinks or not."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant

SLIDING_WINDOW = AttentionVariant(
    name="sliding_window",
    params={"window": "int32"},
    visible_range="return {q_pos < params.window ? 0 : q_pos - params.window + 1, q_pos + 1};",
)
"""The query's own key and the window - 1 before it. window: tokens, >= 1; keys left of it are not read.

The planner does not see the number: give the spec the greatest window less 1 as `window_left`, or work is
balanced as if all keys were read."""

SINK_WINDOW = AttentionVariant(
    name="sink_window",
    params={"window": "int32", "sink_tokens": "int32"},
    defaults={"sink_tokens": 4},
    logits_mask="return kv_idx < params.sink_tokens || q_pos - kv_idx < params.window;",
)
"""The same window, and the first sink_tokens of the request with it.

Keys between are masked, and read on a GPU. Where there are many, keep the pages of both alone, as
examples/streaming_llm does."""
