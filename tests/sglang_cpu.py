# SPDX-License-Identifier: Apache-2.0
"""SGLang on a CPU: layers and pools without an engine; importing this makes SGLang importable."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from demo_sglang import STUBS

SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",  # its allocator of pages is a Triton kernel
    "OMP_NUM_THREADS": "1",
}
SERVER: dict[str, Any] = {
    "attention_backend": "fi",
    "max_prefill_tokens": 256,
    "chunked_prefill_size": 128,
}


if importlib.util.find_spec("sglang") is not None:
    # Before the first import of SGLang, which reads and needs them.
    for _name, _value in SETTINGS.items():
        os.environ.setdefault(_name, _value)
    if str(STUBS) not in sys.path:
        sys.path.append(str(STUBS))
    # Tests ask whether SGLang can be imported: where it is installed and cannot, they fail and skip nothing.
    importlib.import_module("sglang")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model runner is made from. windows: sliding_window_size of each layer, -1 for none."""

    page_size: int = 1
    windows: tuple[int, ...] = (-1, -1)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    dtype: str = "float32"
    kv_dtype: str = "float32"
    cap: float = 0.0
    hybrid: bool = False
    rows: int = 5
    width: int = 512
    slots: int = 2048


def server_arguments(**given: Any) -> SimpleNamespace:
    """Return SGLang's own defaults of the server's arguments, but for SERVER and those given."""
    from sglang.srt.server_args import ServerArgs

    # A dataclass in 0.5.17, a Struct in 0.5.23.
    declared = dataclasses.fields if dataclasses.is_dataclass(ServerArgs) else msgspec_fields
    plain = (bool, int, float, str, type(None))
    defaults = {each.name: each.default for each in declared(ServerArgs) if isinstance(each.default, plain)}
    return SimpleNamespace(**{**defaults, **SERVER, **given})


def msgspec_fields(struct: Any) -> Any:
    """Return the fields of a Struct; msgspec comes with SGLang."""
    from msgspec.structs import fields

    return fields(struct)


def make_runner(shape: Shape, **server: Any) -> Any:
    """Return what the back end reads of an SGLang model runner, with real layers and real pools."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    layers = [
        RadixAttention(
            shape.heads,
            shape.head_dim,
            0.3,
            shape.kv_heads,
            layer_id=index,
            logit_cap=shape.cap,
            v_head_dim=shape.head_dim_v,
            sliding_window_size=window,
        )
        for index, window in enumerate(shape.windows)
    ]
    common = {
        "page_size": shape.page_size,
        "dtype": getattr(torch, shape.kv_dtype),
        "head_num": shape.kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim_v,
        "device": "cpu",
    }
    if shape.hybrid:
        pool = SWAKVPool(
            size=shape.slots,
            size_swa=shape.slots,
            swa_attention_layer_ids=[i for i, window in enumerate(shape.windows) if window >= 0],
            full_attention_layer_ids=[i for i, window in enumerate(shape.windows) if window < 0],
            **common,
        )
    else:
        pool = MHATokenToKVPool(size=shape.slots, layer_num=len(layers), enable_memory_saver=False, **common)
    return SimpleNamespace(
        server_args=server_arguments(**server),
        device="cpu",
        use_mla_backend=False,
        is_draft_worker=False,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        req_to_token_pool=ReqToTokenPool(shape.rows - 1, shape.width, "cpu", False),
        token_to_kv_pool=pool,
        dtype=getattr(torch, shape.dtype),
        page_size=shape.page_size,
        model=torch.nn.ModuleList(layers),
    )
