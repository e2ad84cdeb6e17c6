# SPDX-License-Identifier: Apache-2.0
"""tvm-ffi, imported without torch where the process has none, and introduced to a torch that comes later."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType

_EXCHANGE, _EXTENSION = "__dlpack_c_exchange_api__", "tvm_ffi._optional_torch_c_dlpack"
_importing = threading.Lock()
_imported_alone = False


class _Hidden(MetaPathFinder):
    """Finds no torch for one thread; others may import it meanwhile."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, *_: object) -> None:
        """Raise for torch what an import raises where it is not installed."""
        if fullname == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not imported for tvm-ffi", name=fullname)


def tvm_ffi() -> ModuleType:
    """Return the module tvm_ffi, whose first import takes torch with it only if that is imported already.

    By itself it would import torch wherever that is installed, which takes programs that use another array
    library seconds and hundreds of MiB.
    """
    with _importing, _without_torch():
        return importlib.import_module("tvm_ffi")


def meet_torch() -> None:
    """Let a tvm-ffi that was imported without torch take torch's tensors as it does when torch comes first.

    Call it with torch imported, before a tensor is passed. Newer releases of torch describe their tensors
    themselves; for others tvm-ffi has an extension, without which it would not see torch's current stream.
    Raises ImportError where there is neither and torch has CUDA.
    """
    torch = sys.modules["torch"]
    if not _imported_alone or hasattr(torch.Tensor, _EXCHANGE):
        return
    importlib.reload(sys.modules[_EXTENSION])
    if torch.version.cuda is not None and not hasattr(torch.Tensor, _EXCHANGE):
        raise ImportError(
            "torch: expected to be imported before fi_backend.arrays in a process that uses both, since this "
            f"release ({torch.__version__}) cannot be introduced to tvm-ffi later; got it afterwards."
        )


@contextmanager
def _without_torch() -> Iterator[None]:
    global _imported_alone
    if "torch" in sys.modules:
        yield
        return
    _imported_alone = _imported_alone or "tvm_ffi" not in sys.modules
    finder = _Hidden()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
