# SPDX-License-Identifier: Apache-2.0
# One verb per need. A verb does the set-up that it needs; what is up to date is left alone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build check fix test test-all test-faults soak demo bench-codecs bench-collectives bench-gpu bench-keras bench-first-run bench-loops bench-low-rank bench-ps bench-robust bench-sparse wheel clean set-up-quietly

# The interpreter of .venv, read by tools/setup.sh; empty: the one .venv has, else python3.
PYTHON ?=
export PYTHON
# Set in many containers. Without compiled modules each process reads TensorFlow's sources, 5 s of work.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
# Three tests at a time, as half of a test is waiting; tests/support/schedule.py says which of them never meet.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup
# Files of ours in C++, written by hand: git knows them, generated ones it does not.
CC_FILES = git ls-files -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' ':!tests/**/golden/**'

help: ## this list
	@echo "make VERB [PYTHON=python3.11] [ARGS='more arguments for pytest, demo or a bench-*']"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Debian's tools, .venv, the patched Horovod: everything that the rest needs
	@tools/setup.sh

set-up-quietly:
	@tools/setup.sh --quiet

build: set-up-quietly ## generate the kernels and build the libraries (Bazel); CUDA=1: for GPUs, too (nvcc)
	@tools/build.sh
	@if [ "$(CUDA)" = 1 ]; then $(BIN)/python tools/build_cuda.py; fi

check: build ## format, lint, types, import contracts, quick tests: no TensorFlow, hardly any server or compiler
	@tools/check.sh

fix: set-up-quietly ## format, and mend what the linter can mend
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(CC_FILES) | xargs -r $(BIN)/clang-format -i

test: build ## every test but those that need a network, a GPU or much time
	$(PYTEST) -m "not net and not gpu and not slow" --durations=15 $(ARGS)

test-all: build ## every test that this machine can run
	$(PYTEST) --durations=30 $(ARGS)

test-faults: build ## kill -9 of every role in every phase, cut links, bad states; COUNT=200 schedules from SEED=0
	@$(BIN)/python -m tests.faults $(ARGS)

soak: build ## 10 Keras trainings of which all roles are killed, and COUNT=100 schedules from SEED=1000
	@SEED=$(or $(SEED),1000) COUNT=$(or $(COUNT),100) \
	  $(BIN)/python -m tests.faults --only keras schedules --jobs 2 $(ARGS)

demo: build ## train on two parties and a server, all on this machine; writes demo-out/
	@$(BIN)/python examples/demo.py $(ARGS)

bench-codecs: build ## codecs beside memory, TensorFlow ops and NumPy; the targets of their speed
	@$(BIN)/python -m benchmarks.codecs $(ARGS)

# Without `build`: the machine with the GPU need not have TensorFlow or Bazel.
bench-gpu: ## codecs on a GPU beside a device copy and PyTorch; without one they are compiled
	@$$([ -x $(BIN)/python ] && echo $(BIN)/python || echo python3) -m benchmarks.gpu $(ARGS)

bench-keras: build ## what a strategy costs beside plain Keras and a hand-written Horovod loop
	@$(BIN)/python -m benchmarks.keras_overhead $(ARGS)

bench-collectives: build ## sums over 4 ranks on links of a given rate, beside Horovod's; needs root
	@$(BIN)/python -m benchmarks.collectives $(ARGS)

bench-ps: build ## the parameter server beside Flower; aggregation, memory, load, bytes, time to accuracy; needs root
	@$(BIN)/python -m benchmarks.ps $(ARGS)

bench-loops: build ## local training: overhead, ESync on uneven parties, DiLoCo's bytes, the simulator
	@$(BIN)/python -m benchmarks.loops $(ARGS)

bench-robust: build ## robust aggregation beside reading memory once, TensorFlow's sort and ByzFL
	@$(BIN)/python -m benchmarks.robust $(ARGS)

bench-low-rank: build ## the sum of gradients on 2 ranks: PowerSGD beside exact sums and onebit
	@$(BIN)/python -m benchmarks.low_rank $(ARGS)

bench-sparse: build ## a step of a large embedding on 2 ranks: its gradient as rows and as a table
	@$(BIN)/python -m benchmarks.sparse $(ARGS)

bench-first-run: set-up-quietly ## what a newcomer waits for: a fresh clone, an empty HOME, demo, check, test
	@$(BIN)/python -m benchmarks.first_run $(ARGS)

wheel: build ## dist/: our wheel, and the patched Horovod's beside it
	@rm -rf dist
	@$(BIN)/python -m hatchling build -t wheel -d dist
	@cp "$$(tools/horovod_wheel.sh)" dist/
	@ls dist

clean: ## take away what was built and written here; .venv and the caches outside stay
	rm -rf dist build demo-out train-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f bazel-* tf_hips/_build_info.py tf_hips/ops/*.so
	find compll tf_hips tests benchmarks examples tools -name __pycache__ -prune -exec rm -rf {} +
