# Two commands for a newcomer: `make lab` runs the lab on the shipped pair, `make test` runs the tests.
# PYTHON, VENV and PIP_ARGS may be set on the command line, e.g. make lab PIP_ARGS="--find-links wheels".

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
OUT ?=
BIN := $(VENV)/bin
WORKERS ?= 2
NOTEBOOKS := reports/notebooks

# One thread a process: small models are several times slower on two; the second core runs a second process.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install lab test test-slow test-gpu lint jupyter clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt tools/install.py
	$(PYTHON) tools/install.py --venv $(VENV) --extras dev,compile $(if $(ALLOW_CUDA_WHEELS),--allow-cuda-wheels) -- $(PIP_ARGS)
	touch $@

lab: install
	$(BIN)/eagle3lab nightly $(if $(OUT),--out $(OUT))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --durations=15 -m "not slow and not gpu"

test-slow: install
	$(BIN)/pytest -n $(WORKERS) --durations=15 -m "slow and not gpu"

test-gpu: install
	$(BIN)/pytest -m gpu

# Copies, in a folder that git ignores: JupyterLab writes outputs into what it opens.
jupyter: install
	$(BIN)/pip install -c constraints.txt $(PIP_ARGS) -e ".[jupyter]"
	$(BIN)/eagle3lab notebooks --copy $(NOTEBOOKS)
	$(BIN)/jupyter lab $(NOTEBOOKS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
