# Every target works from a fresh clone with Python 3.11+ and make alone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= smollm2-135m-instruct
# Where pip looks for a CPU build of torch first, e.g. TORCH_INDEX=<the CPU wheel index of pytorch.org>.
TORCH_INDEX ?=

# The environment of `make test-tpu`: torch-xla wants an older torch. TPU_LEVELS="0 2" runs those levels alone.
TPU_VENV ?= .venv-tpu
JOBS ?= 2
TPU_LEVELS ?= 0 1 2 3 4 5
TPU_REPORT ?= docs/vendor/tpu-conformance

TPU_DEVICES_3 := 4
TPU_DEVICES_5 := 2
ON_TPU := PYTHONPATH=.site PYTHONWARNINGS=ignore PJRT_DEVICE=CPU TPU_SKIP_MDS_QUERY=1 XLA_FLAGS="--xla_backend_optimization_level=0" $(TPU_VENV)/bin/python
BIN := $(VENV)/bin
INSTALL := $(PYTHON) ci/install.py --venv $(VENV) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
INPUTS := pyproject.toml setup.py ci/constraints-cpu.txt ci/install.py $(wildcard ops/native/*.cpp ops/native/*.h ops/native/build.py)

.PHONY: serve test test-heavy test-guides test-kernels test-kernels-all test-sanitized test-arm test-tpu lint check bench install dev clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: $(VENV)/.installed  ## serve the default model on port 8000
	$(BIN)/pagoda serve $(MODEL) --port $(PORT)

install: $(VENV)/.installed  ## make .venv and install what serving needs

dev: $(VENV)/.installed-dev  ## the same, with what tests and linters need

test: $(VENV)/.installed-dev  ## the test suite in JOBS processes (2), with the 20 slowest tests
	$(BIN)/python -m pytest -q --durations=20 -n $(JOBS) --dist loadfile -m "not heavy" tests

test-heavy: $(VENV)/.installed-triton  ## the tests over five seconds
	$(BIN)/python -m pytest -q --durations=20 -m heavy tests

test-guides: $(VENV)/.installed-dev  ## the commands and programs of the guides that take over five seconds
	$(BIN)/python -m pytest -q --durations=20 -m heavy tests/e2e/test_guides.py tests/plugin/test_vendor_guide.py tests/unit/test_vendor_pages.py tests/unit/test_contributing.py

test-kernels: $(VENV)/.installed-triton  ## the Triton kernels compiled for nine GPUs that are not here, one use each; float8 of bytes; sums of ranks; FlashInfer's and cuDNN's calls
	PYTHONPATH=$(VENV)/triton $(BIN)/python ci/cross_compile.py
	PYTHONPATH=$(VENV)/triton $(BIN)/python ci/interpret_float8.py
	PYTHONPATH=$(VENV)/triton $(BIN)/python ci/check_one_shot.py
	PYTHONPATH=$(VENV)/triton $(BIN)/python ci/interpret_prompts.py

test-kernels-all: $(VENV)/.installed-triton  ## every configuration of them, and all in Triton's interpreter against the oracle (an hour)
	PYTHONPATH=$(VENV)/triton $(BIN)/python ci/cross_compile.py --all --write --jobs $$(nproc) --cache build/cross-compile
	PYTHONPATH=$(VENV)/triton $(BIN)/python ci/interpret_kernels.py

test-sanitized: $(VENV)/.installed-dev  ## the C++ kernels under the address, undefined behaviour and thread sanitizers
	$(BIN)/python ci/native_checks.py sanitized
	$(BIN)/python ci/native_checks.py threads

test-arm: $(VENV)/.installed-dev  ## the C++ kernels for 64-bit Arm under qemu (Debian: g++-aarch64-linux-gnu qemu-user-static)
	$(BIN)/python ci/native_checks.py arm

test-tpu: $(TPU_VENV)/.installed-tpu  ## --device tpu on its runtime's CPU client: conformance, and no compilation under load (an hour; 7 GB)
	$(foreach level,$(TPU_LEVELS),CPU_NUM_DEVICES=$(or $(TPU_DEVICES_$(level)),1) \
	$(ON_TPU) ci/conformance_parts.py --device tpu --out $(TPU_REPORT) --level $(level) &&) true
	$(ON_TPU) -m pytest -q -p no:warnings tests/device/tpu

check: $(VENV)/.installed-dev  ## lint, types, import contract, budgets, generated tables; changes nothing
	$(BIN)/python ci/check.py

lint: $(VENV)/.installed-dev  ## repair what the linters can, then check
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
	$(BIN)/python ci/check.py

bench: $(VENV)/.installed-dev  ## the benchmarks that fit a laptop
	$(BIN)/python benchmarks/run.py

clean:  ## remove .venv and build outputs
	rm -rf $(VENV) $(TPU_VENV) build dist *.egg-info .site ops/native/*.so

$(VENV)/.installed: $(INPUTS)
	$(INSTALL)
	@touch $@

$(VENV)/.installed-dev: $(INPUTS)
	$(INSTALL) --dev
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-triton: $(VENV)/.installed-dev
	$(INSTALL) --triton
	@touch $@

$(TPU_VENV)/.installed-tpu: $(INPUTS)
	$(INSTALL) --venv $(TPU_VENV) --tpu
	@touch $@
