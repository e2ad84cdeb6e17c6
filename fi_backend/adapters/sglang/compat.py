# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of SGLang: how the adapter registers, and where versions differ.

Checked against SGLang 0.5.17 and 0.5.23. Importing this module imports no part of SGLang.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

from fi_backend.adapters import contract

from . import NAME
from .contract import CONTRACT

_BATCH: Final = "sglang.srt.model_executor.forward_batch_info"
_DRAFTS: Final = "sglang.srt.speculative.draft_utils"


def mismatches() -> list[str]:
    """Return what the installed SGLang lacks of the API that the adapter relies on, one line each."""
    return contract.mismatches(CONTRACT)


def engine() -> str:
    """Return "sglang <version>"."""
    import sglang

    return f"sglang {sglang.__version__}"


def install() -> None:
    """Make fi a choice of --attention-backend and its variants, served by `FiAttnBackend`.

    Raises RuntimeError when another plug-in has taken the name.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered = attention_registry.ATTENTION_BACKENDS.get(NAME)
    if registered is _create:
        return
    if registered is not None or NAME in server_args.ATTENTION_BACKEND_CHOICES:
        raise RuntimeError(f"attention back end {NAME} is already registered for {registered}")
    HookRegistry.register("sglang.srt.utils.common.support_triton", _no_triton_on_cpu, HookType.AFTER)
    HookRegistry.register(f"{_DRAFTS}.DraftBackendFactory._create_backend", _with_drafts, HookType.AROUND)
    HookRegistry.register(f"{_BATCH}.ForwardBatch.init_new", _tell_batch, HookType.AFTER)
    attention_registry.register_attention_backend(NAME)(_create)
    server_args.add_attention_backend_choices([NAME])
    # A row's bits depend on its request alone, also where a prefix comes from the radix cache.
    server_args.add_deterministic_attention_backend_choices([NAME])
    server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    if hasattr(server_args, "add_draft_attention_backend_choices"):  # 0.5.23
        server_args.add_draft_attention_backend_choices([NAME])


def plans_on_another_stream() -> bool:
    """Return whether SGLang prepares the steps of speculation on a stream beside that of the model."""
    settings = importlib.import_module("sglang.srt.environ").envs
    variable = getattr(settings, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", None)
    return variable is not None and bool(variable.get())


def settled(model_runner: Any) -> Any:
    """Return a model runner whose server_args say what SGLang has settled on.

    0.5.23 leaves in its record what was asked for, and keeps its decisions beside it: how many tokens are
    drafted, that inference is deterministic, in how many parts attention runs.
    """
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    if not hasattr(overrides, "resolution_result"):  # 0.5.17 writes them into the record
        return model_runner
    return _Settled(model_runner, server_args=_SettledArguments(model_runner.server_args, overrides))


class _Settled:
    """An object but for some of its attributes."""

    def __init__(self, of: Any, **changed: Any) -> None:
        self._of = of
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _SettledArguments:
    """The arguments of 0.5.23's server, as they are after its decisions."""

    def __init__(self, record: Any, overrides: Any) -> None:
        self._record, self._overrides = record, overrides

    def __getattr__(self, name: str) -> Any:
        if name == "max_speculative_num_draft_tokens":  # a property of 0.5.17's record
            return self._overrides.max_speculative_num_draft_tokens(self._record)
        getattr(self._record, name)  # resolution_result() takes a name that does not exist for None
        return self._overrides.resolution_result(self._record, name)


def tensor_parallel_rank() -> int:
    """Return which part of the heads this process has."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def reads_end_before_replay() -> Any:
    """Return 0.5.23's word for a graph that reads nothing which the scheduler may write."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.PRE_REPLAY


def _create(model_runner: Any) -> Any:
    from .backend import FiAttnBackend

    return FiAttnBackend(settled(model_runner))


def _no_triton_on_cpu(result: bool, backend: str) -> bool:
    """Answer for SGLang, which takes a name that it does not know for one of a GPU.

    It would run its own index kernels in Triton then, on the CPU too.
    """
    from sglang.srt.utils.common import is_cpu

    return False if backend == NAME and is_cpu() else result


def _with_drafts(
    original: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *rest: Any, **more: Any
) -> Any:
    """Let a draft model run on fi: SGLang's table of its back ends is fixed."""
    from .draft import FiDraftBackend

    decodes = backend_map.get("triton") == factory._create_triton_decode_backend

    def create() -> Any:
        runner = factory.draft_model_runner
        made = FiDraftBackend(settled(runner), factory) if decodes else _create(runner)
        return (NAME, made) if "stamps_children" in _parameters(original) else made  # 0.5.23: with its name

    return original(factory, backend_name, {**backend_map, NAME: create}, *rest, **more)


def _tell_batch(result: Any, _class: Any, batch: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """Hand the scheduler's batch, which knows the requests and their tree, to our back ends."""
    chosen: Any = getattr(model_runner, "attn_backend", None)
    parts = ("prefill_backend", "decode_backend")
    backends: list[Any] = [chosen, *(getattr(chosen, part, None) for part in parts)]
    for each in backends:
        if type(each).__name__ == "FiAttnBackend":
            each.expect(batch, result)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)
