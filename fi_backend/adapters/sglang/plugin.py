# SPDX-License-Identifier: Apache-2.0
"""The entry point `sglang.srt.plugins`: registers the attention back end fi with SGLang.

SGLang calls it in every process that it starts, before it reads its arguments, so it is idempotent, touches
no accelerator, and never fails for a user who runs another back end.
"""

from __future__ import annotations

import logging

from . import compat

# Below SGLang's own logger, so that its level and format apply.
_log = logging.getLogger("sglang.srt.plugins.fi_backend")


def register() -> None:
    """Register fi; where that is not possible, log why and leave SGLang as it is."""
    try:
        if problems := compat.mismatches():
            reason = "\n  ".join(("this SGLang differs from what the adapter relies on:", *problems))
        else:
            compat.install()
            return
    except Exception as error:  # noqa: BLE001 - SGLang would log a traceback, and no reason
        reason = f"{type(error).__name__}: {error}"
    _log.error("fi_backend is not registered, --attention-backend fi will be unknown: %s", reason)
