#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need a CUDA device, each group in a process of its own, so that a kernel that hangs
# costs one group and not the run.
#
#   scripts/gpu_tests.sh [all|tests|attention|bits|steps|masks|variants|prefixes|faults|arrays|others|
#                         sanitizer|memcheck|racecheck]
#
# PYTHON: the interpreter (default python3). PYTEST_ARGS: for pytest. SANITIZER_ARGS: for compute-sanitizer,
# such as "--racecheck-report all", which names threads. LIMIT: seconds a group may take (default 180). Exits
# with 1 if any group failed.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-180}
what=${1:-all}
failed=

group() { # name, command ...
    name=$1
    shift
    echo "== $name"
    # KILL, since a process that waits for a hung kernel takes no other signal.
    timeout -s KILL "$LIMIT" "$@" || failed="$failed $name"
}

tests() { # name, files ...
    name=$1
    shift
    # shellcheck disable=SC2086
    group "$name" "$PYTHON" -m pytest -q -p no:cacheprovider -o faulthandler_timeout=60 --durations=10 \
        --maxfail=15 --tb=short ${PYTEST_ARGS:-} "$@"
}

sanitize() { # tool, options ...
    tool=$1
    shift
    # What one lane of a warp says for the others is a race to racecheck.
    kernels=
    [ "$tool" = racecheck ] && kernels="--kernel-define FI_EVERY_LANE_ARRIVES=1"
    command -v compute-sanitizer >/dev/null || { echo "$tool: compute-sanitizer is not on the PATH"; failed="$failed $tool"; return; }
    compute-sanitizer --version | grep -i version
    # Compile outside of the tool, which would follow the compilers.
    # shellcheck disable=SC2086
    "$PYTHON" -m pytest -q -p no:cacheprovider $kernels tests/gpu/test_cuda_attention_sanitizer.py -k append >/dev/null
    # Every tensor in an allocation of its own, so that accesses behind its end are seen.
    # shellcheck disable=SC2086
    group "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" ${SANITIZER_ARGS:-} \
        "$PYTHON" -m pytest -q -x -p no:cacheprovider --tb=short $kernels ${PYTEST_ARGS:-} \
        tests/gpu/test_cuda_attention_sanitizer.py
}

case $what in
all | tests | attention | bits | steps | masks | variants | prefixes | faults | arrays | others) ;;
sanitizer | memcheck | racecheck) ;;
*)
    echo "$0: expected all or a group of tests (see the head of this file); got '$what'" >&2
    exit 2
    ;;
esac
case $what in
all | tests | attention) tests attention tests/gpu/test_cuda_attention.py tests/gpu/test_cuda_attention_values.py ;;
esac
case $what in
all | tests | bits) tests bits tests/gpu/test_cuda_attention_bits.py tests/gpu/test_cuda_attention_bits_wgmma.py ;;
esac
case $what in
all | tests | steps)
    tests steps tests/gpu/test_cuda_attention_graphs.py \
        tests/gpu/test_cuda_attention_calls.py tests/gpu/test_cuda_attention_sanitizer.py
    ;;
esac
case $what in
all | prefixes)
    tests prefixes tests/gpu/test_cuda_attention_prefix.py tests/gpu/test_cuda_attention_prefix_steps.py
    ;;
esac
case $what in
all | masks)
    tests masks tests/gpu/test_cuda_attention_masks.py tests/gpu/test_cuda_attention_head_masks.py \
        tests/gpu/test_cuda_attention_block_sparse.py tests/gpu/test_cuda_attention_examples.py
    ;;
esac
case $what in
all | variants) tests variants tests/gpu/test_cuda_user_variants.py ;;
esac
case $what in
all | faults) tests faults tests/gpu/test_cuda_attention_faults.py ;;
esac
case $what in
all | arrays) tests arrays tests/gpu/test_cuda_attention_arrays.py ;;
esac
case $what in
all | others)
    # shellcheck disable=SC2046
    tests others $(find tests/gpu -name 'test_*.py' ! -name 'test_cuda_attention*' ! -name 'test_cuda_user_variants.py' | sort)
    ;;
esac
case $what in
all | sanitizer | memcheck) sanitize memcheck ;;
esac
case $what in
all | sanitizer | racecheck) sanitize racecheck --racecheck-report analysis ;;
esac
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
echo "all groups passed"
