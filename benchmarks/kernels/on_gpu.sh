#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the kernels beside their peers on a machine without a registry:
#   on_gpu.sh ARCHIVE [options of `fi-backend bench kernels`]
#   TABLE=prefill-dims on_gpu.sh ARCHIVE
#   TABLE=planning on_gpu.sh ARCHIVE
# ARCHIVE: made by pack_peers.py. TABLE: targets (default), prefill-dims, decode-pages or variants, written to
# $OUT/kernels-h200.json or $OUT/kernels-h200-TABLE.json (default of OUT: build); or planning, what needs no peers:
# plans and detection of prefixes on the GPU and the cost of sparsity, to $OUT/plan-h200.json, plan-shared-h200.json
# and sparse-cost-h200.json. Exits with 1 if a row does not stand.
set -euo pipefail
table=${TABLE:-targets}
case $table in
targets) name=kernels-h200 ;;
prefill-dims | decode-pages | variants) name=kernels-h200-$table ;;
planning) name= ;;
*)
  echo "TABLE: expected targets, prefill-dims, decode-pages, variants or planning; got '$table'" >&2
  exit 2
  ;;
esac
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
fi_backend() {
  python3 -c 'import sys; sys.argv[0] = "fi-backend"; from fi_backend.cli.main import app; app()' "$@"
}
if [[ $table == planning ]]; then
  failed=0
  fi_backend bench plan --device cuda --json "$out/plan-h200.json" || failed=1
  fi_backend bench plan --device cuda --shared --json "$out/plan-shared-h200.json" || failed=1
  python3 benchmarks/kernels/sparse_cost.py --device cuda --json "$out/sparse-cost-h200.json" || failed=1
  exit $failed
fi
fi_backend bench kernels --device cuda --table "$table" --fa3-library "$peers/fa3/_vllm_fa3_C.abi3.so" \
  --json "$out/$name.json" "$@"
