# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of vLLM: what the adapter relies on, and where versions differ.

Checked against vLLM 0.26.0, 0.32.0 and 0.33.0. Importing this module imports no part of vLLM.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, Final

from fi_backend.adapters import contract

NAME: Final = "FI"
BACKEND_PATH: Final = "fi_backend.adapters.vllm.backend.FiBackend"

_CONTRACT: Final[contract.Contract] = (
    ("vllm.config", "get_current_vllm_config", ()),
    ("vllm.config", "VllmConfig", ("additional_config",)),
    ("vllm.config", "ModelConfig", ("max_model_len", "enable_sleep_mode")),
    ("vllm.config", "ModelConfig", frozenset({"hf_config"})),
    ("vllm.config", "CacheConfig", ("block_size", "enable_prefix_caching")),
    ("vllm.config", "SchedulerConfig", ("max_num_seqs", "max_num_batched_tokens")),
    ("vllm.config", "ParallelConfig", ("tensor_parallel_size",)),
    ("vllm.config", "ParallelConfig.use_ubatching", ()),
    ("vllm.config", "SpeculativeConfig", ("num_speculative_tokens",)),
    ("vllm.config", "CompilationConfig", ("static_forward_context",)),
    ("vllm.distributed", "get_tensor_model_parallel_rank", ()),
    ("vllm.envs", "environment_variables", ()),
    ("vllm.platforms", "current_platform.is_cpu", ()),
    ("vllm.platforms", "current_platform.get_attn_backend_cls", ("selected_backend", "attn_selector_config")),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.get_class", ()),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.get_path", ()),
    ("vllm.v1.attention.backends.registry", "_ATTN_OVERRIDES", ()),
    ("vllm.v1.attention.selector", "AttentionSelectorConfig._asdict", ()),
    (
        "vllm.v1.attention.backend",
        "AttentionBackend.validate_configuration",
        ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse"),
    ),
    (
        "vllm.v1.attention.backend",
        "AttentionBackend.supports_combination",
        ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse"),
    ),
    ("vllm.v1.attention.backend", "AttentionBackend.forward_includes_kv_cache_update", ()),
    (
        "vllm.v1.attention.backend",
        "AttentionImpl.__init__",
        (
            "self",
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "sliding_window",
            "kv_cache_dtype",
            "logits_soft_cap",
            "attn_type",
            "kv_sharing_target_layer_name",
        ),
    ),
    (
        "vllm.v1.attention.backend",
        "AttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
    ),
    (
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.__init__",
        ("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    (
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.get_cudagraph_support", ()),
    *(
        ("vllm.v1.attention.backend", f"AttentionMetadataBuilder.{name}", ("self", *arguments))
        for name, arguments in (
            ("build_for_cudagraph_capture", ("common_attn_metadata",)),
            ("build_for_drafting", ("common_attn_metadata", "draft_index")),
        )
    ),
    ("vllm.v1.attention.backend", "AttentionCGSupport.ALWAYS", ()),
    ("vllm.v1.attention.backend", "AttentionCGSupport.NEVER", ()),
    ("vllm.v1.attention.backend", "AttentionType.DECODER", ()),
    ("vllm.v1.attention.backend", "MultipleOf", ("base",)),
    (
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "causal",
            "seq_lens_cpu_upper_bound",
        ),
    ),
)


def mismatches() -> list[str]:
    """Return what the installed vLLM lacks of the API that the adapter relies on, one line each."""
    return contract.mismatches(_CONTRACT)


def engine() -> str:
    """Return "vllm <version>"."""
    import vllm

    return f"vllm {vllm.__version__}"


def install() -> None:
    """Add FI to vLLM's enum and make the CPU platform honour it: both, or nothing and an exception."""
    undo = honour_choice_on_cpu()
    try:
        add_enum_member()
    except BaseException:
        undo()
        raise


def add_enum_member() -> Any:
    """Add FI to vLLM's enum of attention back ends, if it is not there yet, and return the member.

    Raises RuntimeError when another plug-in has taken the name.
    """
    from vllm.v1.attention.backends import registry

    enum: Any = registry.AttentionBackendEnum
    if NAME not in enum.__members__:
        if hasattr(enum, "register"):
            enum.register(NAME, BACKEND_PATH)
        else:  # 0.26: the enum is closed, so the steps of the later register() are done here
            member = object.__new__(enum)
            member._name_, member._value_ = NAME, BACKEND_PATH
            setattr(enum, NAME, member)
            enum._member_map_[NAME] = member
            enum._value2member_map_[BACKEND_PATH] = member
            enum._member_names_.append(NAME)
    member = enum[NAME]
    if member.value != BACKEND_PATH:
        raise RuntimeError(f"attention back end {NAME} is already registered for {member.value}")
    registry._ATTN_OVERRIDES[member] = BACKEND_PATH
    # The configuration travels to spawned processes as a pickle that is read before plug-ins are loaded.
    copyreg.pickle(enum, _reduce_member)
    return member


def _reduce_member(member: Any) -> tuple[Any, tuple[Any, ...]]:
    return (add_enum_member, ()) if member.name == NAME else (type(member), (member.value,))


def honour_choice_on_cpu() -> Callable[[], None]:
    """Make vLLM's CPU platform, which runs CPU_ATTN whatever is asked for, accept FI; return its undoing.

    A configuration that the back end refuses raises ValueError with its reasons.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    original = platform.get_attn_backend_cls
    if not current_platform.is_cpu() or getattr(original, "honours_fi", False):
        return lambda: None

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        # By its path: another plug-in may have taken the name.
        if getattr(selected_backend, "value", None) != BACKEND_PATH:
            return str(original(selected_backend, attn_selector_config, *args, **kwargs))
        backend = selected_backend.get_class()
        # No capability stands for the CPU.
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(
                f"attention back end {NAME} cannot run this configuration: {'; '.join(reasons)}. "
                f"Choose another --attention-backend. ({attn_selector_config})"
            )
        return str(selected_backend.get_path())

    declared = platform.__dict__.get("get_attn_backend_cls")

    def undo() -> None:
        if declared is None:  # inherited
            del platform.get_attn_backend_cls
        else:
            platform.get_attn_backend_cls = declared

    get_attn_backend_cls.honours_fi = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    return undo


def tensor_parallel_rank() -> int:
    """Return which part of the heads this process has."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def kv_len_bounds(common: Any, *, drafts: int = 0, limit: int) -> Any:
    """Return upper bounds of the KV lengths, host int32 [requests], or None where the host knows none.

    The device is not waited for. drafts: tokens a draft model may have added to a request; vLLM (0.32)
    lengthens the requests of a drafting step but not its host bounds, so that those alone are too small.
    limit: of any length; vLLM's dummy steps exceed it.
    """
    requests = common.num_reqs
    if common.seq_lens.device.type == "cpu":
        return common.seq_lens[:requests]
    bounds = common.seq_lens_cpu_upper_bound
    if bounds is None:
        return None
    return (bounds[:requests] + drafts).clamp_(max=limit)


class KVLayoutOf026:
    """What vLLM 0.26 asks a back end about the KV cache; later versions derive it from their own spec."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the logical shape: K and V of one token side by side."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order of the dimensions in memory; any would do, so the configured layout is taken."""
        from vllm.v1.attention.backends import utils

        token_major = utils.get_kv_cache_layout() == "NHD"
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if token_major else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if token_major else (0, 1, 2, 3)
