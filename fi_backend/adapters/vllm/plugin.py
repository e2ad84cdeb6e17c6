# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: registers the attention back end FI with vLLM.

vLLM calls it in every process that it starts, the short-lived ones too, so it is cheap and idempotent,
touches no accelerator, and never fails for a user who runs another back end.
"""

from __future__ import annotations

import logging

from . import compat

# Below vLLM's own logger, so that its level and format apply.
_log = logging.getLogger("vllm.plugins.fi_backend")


def register() -> None:
    """Register FI; on a vLLM whose API is not the expected one, log what differs and leave vLLM as it is."""
    if problems := compat.mismatches():
        _log.error(
            "fi_backend is not registered, --attention-backend fi will be unknown: this vLLM differs from "
            "what the adapter relies on:\n  %s",
            "\n  ".join(problems),
        )
        return
    compat.honour_choice_on_cpu(compat.add_enum_member())
