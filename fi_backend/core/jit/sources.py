# SPDX-License-Identifier: Apache-2.0
"""The project text that a module depends on: its sources and every header they include."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fi_backend.core.jit.module import ModuleSpec, csrc_root
from fi_backend.errors import BuildError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def dependency_texts(spec: ModuleSpec) -> Iterator[tuple[str, bytes]]:
    """Yield (label, text) of the generated files, the sources and, transitively, the headers in quotes.

    Conditional inclusion is not evaluated: a header behind #ifdef counts, which can only rebuild too
    often. A name found neither beside the including file nor below the root belongs to a library
    (tvm-ffi, CUDA), which the cache key covers by its version.

    Raises BuildError if a source is missing.
    """
    root = csrc_root()
    pending: list[Path] = []
    seen: set[Path] = set()
    for name, content in sorted(spec.generated):
        data = content.encode()
        yield f"generated/{name}", data
        pending += _included(data, None, root)
    for label, source in zip(spec.sources, spec.source_paths(), strict=True):
        try:
            data = source.read_bytes()
        except OSError as error:
            raise BuildError(f"module {spec.name}: cannot read its source {source}: {error}") from error
        seen.add(source)
        # An absolute source is labelled by its name, so that the key does not depend on where it lies.
        yield f"source/{Path(label).name if Path(label).is_absolute() else label}", data
        pending += _included(data, source.parent, root)
    while pending:
        header = pending.pop()
        if header in seen:
            continue
        seen.add(header)
        data = header.read_bytes()
        label = header.relative_to(root).as_posix() if header.is_relative_to(root) else header.name
        yield f"header/{label}", data
        pending += _included(data, header.parent, root)


def _included(data: bytes, folder: Path | None, root: Path) -> list[Path]:
    found = []
    for match in _INCLUDE.finditer(data):
        name = match.group(1).decode(errors="replace")
        for base in (folder, root):
            if base is not None and (path := (base / name).resolve()).is_file():
                found.append(path)
                break
    return found
