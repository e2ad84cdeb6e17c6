#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a small model for tests: copy-llama, or one of fixed random weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from models import copy_llama, random_models


def main() -> None:
    """Parse the command line and write the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    copy = commands.add_parser("copy", help=copy_llama.__doc__.splitlines()[0])
    copy.add_argument("folder", type=Path)
    copy.add_argument("--head-dim", type=int, default=64, choices=(64, 128, 256))
    copy.add_argument("--heads", type=int, default=4)
    copy.add_argument("--kv-heads", type=int, default=2)
    random = commands.add_parser("random", help=random_models.__doc__.splitlines()[0])
    random.add_argument("folder", type=Path, help="gets one subfolder a kind")
    random.add_argument(
        "kinds", nargs="*", metavar="kind", help=f"of {', '.join(random_models.KINDS)}; default: all"
    )
    options = parser.parse_args()
    if options.command == "copy":
        copy_llama.make(
            options.folder, head_dim=options.head_dim, heads=options.heads, kv_heads=options.kv_heads
        )
    else:
        for kind in options.kinds or random_models.KINDS:
            random_models.make(options.folder / kind, kind)


if __name__ == "__main__":
    main()
