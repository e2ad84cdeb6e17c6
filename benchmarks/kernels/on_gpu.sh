#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the kernels beside their peers on a machine without a registry:
#   on_gpu.sh ARCHIVE [options of `fi-backend bench kernels`]
# ARCHIVE: made by pack_peers.py. Writes $OUT/kernels-h200.json (default of OUT: build).
set -euo pipefail
archive=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-build}
peers=${PEERS:-/tmp/fi_backend_peers}
mkdir -p "$out"
if [[ ! -d $peers ]]; then
  python3 - "$archive" "$peers.part" <<'PY'
import sys, tarfile
with tarfile.open(sys.argv[1], "r:xz") as archive:
    archive.extractall(sys.argv[2], filter="fully_trusted")
PY
  mv "$peers.part" "$peers"
fi
export PYTHONPATH=$PWD:$peers${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# The archive brings FlashInfer's modules: one that is missing is named instead of compiled for a minute.
export FLASHINFER_DISABLE_JIT=1 FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer
export FI_BACKEND_CACHE_DIR=${FI_BACKEND_CACHE_DIR:-/tmp/fi_backend_cache}
exec python3 -c 'import sys; sys.argv[0] = "fi-backend"; from fi_backend.cli.main import app; app()' \
  bench kernels --device cuda --fa3-library "$peers/fa3/_vllm_fa3_C.abi3.so" --json "$out/kernels-h200.json" "$@"
