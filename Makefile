# Every target sets up what it needs. On a fresh machine that is a virtual environment in .venv, several gigabytes
# with torch's CUDA build; it is made anew only when pyproject.toml has changed.

PYTHON ?= python3
GPU_PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# Ranks share the cores; more threads than that measure the operating system's scheduler.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench gpu soak clean

help:
	@echo "make demo   two ranks train on the digits data set"
	@echo "make test   lint, then every test that fits this machine"
	@echo "make lint   ruff and mypy"
	@echo "make bench  micro-benchmarks; fails where a ratio to torch has become worse by more than a quarter"
	@echo "make gpu    tests and benchmarks that need a CUDA device, with GPU_PYTHON ($(GPU_PYTHON)) and its own packages"
	@echo "make soak   every combination, 120 faults, long runs (ten minutes or more)"
	@echo "make clean  remove caches and built files; .venv stays"

demo: $(INSTALLED)
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/digits.py

# Ranks mostly wait for each other, so that three files at a time fill two cores; ranks of one file stay together.
TEST_WORKERS ?= 3

test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m pytest bench/micro --benchmark-columns=min,median,rounds --benchmark-group-by=func

# A GPU machine may have no network: no virtual environment here, and a skip that says what is missing. Both halves have
# a time limit, so that the whole ends within 8 minutes.
gpu:
	@reason=$$($(GPU_PYTHON) -c "$$CUDA_REASON") || reason="$(GPU_PYTHON) does not run"; \
	export PYTHONPATH="$(CURDIR):$(CURDIR)/kernels$${PYTHONPATH:+:$$PYTHONPATH}"; \
	if [ -n "$$reason" ]; then echo "make gpu: skipped: $$reason"; exit 0; fi; \
	status=0; $(GPU_PYTHON) -m dear doctor; \
	timeout -k 10 270 $(GPU_PYTHON) -m pytest tests/gpu -m gpu -q -rfEs || status=1; \
	timeout -k 10 180 $(GPU_PYTHON) -m bench gpu --budget-s 120 --json gpu-results.jsonl || status=1; \
	exit $$status

soak: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m soak --timeout 3600

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

define CUDA_REASON
try:
    import torch
except ImportError as error:
    print(f"$(GPU_PYTHON) cannot import torch ({error}); name another with GPU_PYTHON=")
else:
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} of $(GPU_PYTHON) sees no CUDA device")
    else:
        import importlib.util
        if importlib.util.find_spec("pytest") is None:
            print("$(GPU_PYTHON) has no pytest")
endef
export CUDA_REASON

define CHECK_VERSION
import sys
if sys.version_info < (3, 11):
    sys.exit("dear needs Python 3.11 or newer; $(PYTHON) is %d.%d.%d. Name another: make PYTHON=..." % sys.version_info[:3])
endef
export CHECK_VERSION

# A .venv that lacks pip (an interrupted or refused creation) or has an older Python is made anew.
$(INSTALLED): pyproject.toml
	@if ! { $(BIN)/python -c "$$CHECK_VERSION" && $(BIN)/python -m pip --version; } >/dev/null 2>&1; then \
		$(PYTHON) -c "$$CHECK_VERSION" && echo "making $(VENV) with $(PYTHON)" && $(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "installing into $(VENV): torch and what the demo and the tests need (a minute or more)"
	$(PIP_INSTALL) -e '.[demo,dev,tune,bench]'
	@touch $@
