#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command of this checkout on an engine that is unpacked, not installed, and ends all that it started:
#   scripts/unpacked.sh ENGINE_FOLDER COMMAND ...
#   WHEELS=wheels MODULES=modules.tar.xz scripts/unpacked.sh vllm python3 scripts/serve_prefixes.py --json FILE
# WHEELS: folder of wheels that come before the engine's packages, such as apache-tvm-ffi. MODULES: an archive of
# what scripts/gpu_modules.py compiled. LIMIT: seconds until the command is ended as Ctrl-C would (default 540).
# Exits with 3 if another process holds the memory of the GPU: an engine would only start to fail.
set -euo pipefail
usage="usage: scripts/unpacked.sh ENGINE_FOLDER COMMAND ..."
engine=${1:?$usage}
shift
[[ $# -gt 0 ]] || { echo "$usage" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d $engine ]] || { echo "ENGINE_FOLDER: expected a folder; got $engine" >&2; exit 2; }
on_gpu() { nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | sort || true; }
before=$(on_gpu)
if command -v nvidia-smi >/dev/null; then
  held=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | sort -n | tail -1)
  if [[ $held -gt 4096 ]]; then
    echo "GPU: expected its memory to be free; $held MiB are held. End the process that holds it (nvidia-smi)." >&2
    exit 3
  fi
fi
work=${TMPDIR:-/tmp}/fi_backend_unpacked
mkdir -p "$work/cache"
unset PYTHONPATH
eval "$(python3 scripts/checkout_env.py --engine "$engine" --metadata "$work/metadata")"
if [[ -n ${WHEELS:-} ]]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$work/wheels" "$WHEELS"/*.whl
  export PYTHONPATH=$work/wheels:$PYTHONPATH
fi
export FI_BACKEND_CACHE_DIR=${FI_BACKEND_CACHE_DIR:-$work/cache}
[[ -z ${MODULES:-} ]] || tar -xf "$MODULES" -C "$FI_BACKEND_CACHE_DIR"
# A session of its own: engines start processes that outlive whoever started them, and keep the GPU's memory.
# Some have sessions of their own as well: they are what has come to the GPU since. The command has a minute to
# stop its servers.
status=0
setsid --wait timeout --signal=INT --kill-after=60 "${LIMIT:-540}" "$@" &
child=$!
trap 'kill -INT -- "-$child" 2>/dev/null || true' INT TERM HUP
wait "$child" || status=$?
pkill -KILL --session "$child" 2>/dev/null || true
for each in $(comm -13 <(echo "$before") <(on_gpu)); do kill -KILL "$each" 2>/dev/null || true; done
exit "$status"
