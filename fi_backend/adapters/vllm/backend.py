# SPDX-License-Identifier: Apache-2.0
"""What the back end tells vLLM about itself: its name, its classes, and what it can and cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from fi_backend.core.spec import MAX_HEAD_DIM
from fi_backend.core.support import unsupported_reason
from fi_backend.errors import UnsupportedError

from .compat import NAME, KVLayoutOf026
from .translate import layer_spec

if TYPE_CHECKING:
    from .impl import FiAttentionImpl
    from .metadata import FiMetadataBuilder

BLOCK_SIZE_MULTIPLE = 8
# The kernels copy asynchronously from global to shared memory, which older GPUs cannot.
LEAST_CAPABILITY = (8, 0)


class FiBackend(KVLayoutOf026, AttentionBackend):
    """Decoder attention over vLLM's paged KV cache; `--attention-backend fi`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name of the enum member, as vLLM demands."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FiAttentionImpl]:
        """Return the class of one attention layer."""
        from .impl import FiAttentionImpl

        return FiAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FiMetadataBuilder]:
        """Return the class that plans a step."""
        from .metadata import FiMetadataBuilder

        return FiMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the block sizes that the kernels take."""
        return [MultipleOf(BLOCK_SIZE_MULTIPLE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether K and V of this many elements a head fit."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return True for decoder attention alone."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: a sink is one more logit in the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Return True: an fp8 cache has one scale for K and one for V, or as many as KV heads."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: VLLM_BATCH_INVARIANT=1 turns the core's batch-invariant mode on."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return False: no connector has moved blocks of a cache that fi reads or writes."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: the plan covers the host's query lengths.

        A row that is shorter on the device is clamped, but adaptive verification spreads a draft budget
        evenly on the host and unevenly on the device, so that a row may be longer there than planned.
        """
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why the configuration is refused, in words, or None; no capability stands for the CPU."""
        reasons = []
        if not cls.supports_head_size(head_size):
            reasons.append(f"head size {head_size} is outside 1..{MAX_HEAD_DIM}")
        if not cls.supports_block_size(block_size):
            reasons.append(f"block size {block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}")
        if not cls.supports_dtype(dtype):
            reasons.append(f"{dtype} is none of {', '.join(map(str, cls.supported_dtypes))}")
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            reasons.append(
                f"KV cache dtype {kv_cache_dtype} is none of {', '.join(cls.supported_kv_cache_dtypes)}"
            )
        if device_capability is not None and not reasons:
            reasons += _reasons_of_gpu(
                device_capability, head_size, dtype, kv_cache_dtype, block_size, has_sink
            )
        return "; ".join(reasons) or None


def _reasons_of_gpu(
    capability: Any,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int | None,
    has_sink: bool,
) -> list[str]:
    """Return why a GPU cannot run the configuration, without touching one: vLLM may fork after asking."""
    reasons = []
    if tuple(capability)[:2] < LEAST_CAPABILITY:
        major, minor = LEAST_CAPABILITY
        reasons.append(f"compute capability {capability[0]}.{capability[1]} is below {major}.{minor}")
    try:
        spec = layer_spec(
            num_heads=1,
            num_kv_heads=1,
            head_size=head_size,
            scale=1.0,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype or "auto",
            block_size=block_size or BLOCK_SIZE_MULTIPLE,
            sliding_window=None,
            logits_soft_cap=None,
            alibi=False,
            sinks=has_sink,
            batch_invariant=False,
        )
    except UnsupportedError as error:
        return [*reasons, str(error)]
    reason = unsupported_reason(spec, torch.device("cuda"))
    return [*reasons, reason] if reason else reasons
