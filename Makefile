# Two commands for a newcomer: `make lab` runs the lab on the shipped pair, `make test` runs the tests.
# PYTHON, VENV, PIP_ARGS and JUPYTER_ARGS may be set on the command line, e.g. make jupyter JUPYTER_ARGS=--allow-root,
# which root needs, or make lab PIP_ARGS="--find-links wheels". HASHES is
# where-listed (every wheel of hashes.txt is held to its hash), require (nothing else may come) or ignore.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
HASHES ?= where-listed
OUT ?=
JUPYTER_ARGS ?=
ARCH ?= sm_90a
BIN := $(VENV)/bin
WORKERS ?= 2
NOTEBOOKS := reports/notebooks
INSTALL = $(PYTHON) tools/install.py --venv $(VENV) --hashes $(HASHES) $(if $(ALLOW_CUDA_WHEELS),--allow-cuda-wheels)

# One thread a process: small models are several times slower on two; the second core runs a second process.
export OMP_NUM_THREADS := 1
# Nights and tests start dozens of processes; each would compile both packages anew where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install cubins lab test test-slow test-exhaustive test-gpu lint jupyter clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt hashes.txt tools/install.py
	$(INSTALL) --extras dev,compile,serve -- $(PIP_ARGS)
	touch $@

lab: install
	$(BIN)/eagle3lab nightly $(if $(OUT),--out $(OUT))

# Kernels of the shapes that have a name, for machines without a compiler (EAGLE3_CUBINS); needs no GPU.
cubins: install
	$(BIN)/eagle3lab warm --geometry all --arch $(ARCH) --archive dist/cubins-$(ARCH).zip

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Types take one core for a minute: they are looked at beside the tests, and their findings shown behind them.
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --durations=15 -m "not slow and not gpu"; tests=$$?; \
	wait $$types; typed=$$?; cat $(VENV)/types.txt; \
	test $$tests -eq 0 -a $$typed -eq 0

test-slow: install
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=15 -m "slow and not exhaustive and not gpu"

test-exhaustive: install
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=15 -m "exhaustive and not gpu"

test-gpu: install
	$(BIN)/pytest -m gpu

# Copies, in a folder that git ignores: JupyterLab writes outputs into what it opens.
jupyter: install
	$(INSTALL) --extras dev,compile,serve,jupyter -- $(PIP_ARGS)
	$(BIN)/eagle3lab notebooks --copy $(NOTEBOOKS)
	$(BIN)/jupyter lab $(JUPYTER_ARGS) $(NOTEBOOKS)/00_start_here.ipynb

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
