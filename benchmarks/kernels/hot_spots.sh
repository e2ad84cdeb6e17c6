#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Where a kernel spends its time: Nsight Compute's samples by region and by instruction.
#   hot_spots.sh KERNEL COMMAND ...
#   hot_spots.sh attention_kernel python3 benchmarks/kernels/one_call.py 'shared_256x(2k+64)'
# KERNEL: part of the kernel's name; its second launch is profiled. COUNT: instructions to list (default 40). The
# command runs once outside of the profiler, which would follow the compilers. Writes $OUT/hot.csv (default: build).
set -euo pipefail
kernel=${1:?"usage: hot_spots.sh KERNEL COMMAND ..."}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-build}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$@" >/dev/null
ncu --kernel-name "regex:$kernel" --launch-skip 1 --launch-count 1 --section SourceCounters \
  --section WarpStateStats --section SpeedOfLight --section ComputeWorkloadAnalysis \
  --section MemoryWorkloadAnalysis -f -o "$out/hot" "$@" >/dev/null
ncu --import "$out/hot.ncu-rep" --page source --csv >"$out/hot.csv"
ncu --import "$out/hot.ncu-rep" --page details |
  grep -E "Duration|SM Frequency|Elapsed Cycles|Executed Ipc|Issue Slots|Throughput|Tensor" || true
python3 benchmarks/kernels/hot_spots.py "$out/hot.csv" --count "${COUNT:-40}"
