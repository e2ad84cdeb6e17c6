#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Where the attention kernel spends its time on one row of `bench kernels`: Nsight Compute's samples by instruction.
#   hot_spots.sh ROW [instructions to list]
# Prints utilisation, the stalls of the whole kernel, regions of 150 instructions, and the hottest ones.
set -euo pipefail
row=${1:?"usage: hot_spots.sh ROW [N]"} count=${2:-40}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3} out=${OUT:-build}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" benchmarks/kernels/one_call.py "$row"  # compile outside of the profiler
ncu --kernel-name regex:attention_kernel --launch-skip 1 --launch-count 1 --section SourceCounters \
  --section WarpStateStats --section SpeedOfLight --section ComputeWorkloadAnalysis \
  --section MemoryWorkloadAnalysis -f -o "$out/hot" "$python" benchmarks/kernels/one_call.py "$row" >/dev/null
ncu --import "$out/hot.ncu-rep" --page source --csv >"$out/hot.csv"
ncu --import "$out/hot.ncu-rep" --page details | grep -E "Duration|SM Frequency|Elapsed Cycles|Executed Ipc|Issue Slots|Throughput|Tensor" || true
"$python" benchmarks/kernels/hot_spots.py "$out/hot.csv" --count "$count"
