# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: registers the attention back end FI with vLLM.

vLLM calls it in every process that it starts, the short-lived ones too, so it is cheap and idempotent,
touches no accelerator, and never fails for a user who runs another back end.
"""

from __future__ import annotations

import logging
from functools import cache

from . import compat

# Below vLLM's own logger, so that its level and format apply.
_log = logging.getLogger("vllm.plugins.fi_backend")


def register() -> None:
    """Register FI; where that is not possible, log why, once, and leave vLLM as it is."""
    try:
        if problems := compat.mismatches():
            reason = "\n  ".join(("this vLLM differs from what the adapter relies on:", *problems))
        else:
            compat.install()
            return
    except Exception as error:  # noqa: BLE001 - an exception here would stop engines that never asked for FI
        reason = f"{type(error).__name__}: {error}"
    _report(reason)


@cache  # vLLM may load its plug-ins several times in a process
def _report(reason: str) -> None:
    _log.error("fi_backend is not registered, --attention-backend fi will be unknown: %s", reason)
