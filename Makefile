# SPDX-License-Identifier: Apache-2.0
# Everything happens in .venv and .cache; a second call finds them there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# A machine that finds no CPU build by itself: make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Ranks of a test wait for each other a good part of the time. A file's tests share the parents that fork them.
PARALLEL := -n 2 --dist loadfile
MEGATRON := 0.12.1 0.15.3 0.19.2
# The catalogue is checked against the sources of all of these.
MEGATRON_FULL := $(MEGATRON) 0.6.0 0.7.0 0.8.0 0.9.0 0.10.0 0.11.0 0.12.3 0.13.1 0.14.0 0.16.1 0.17.1 0.18.2
MEGATRON_DIRS := $(MEGATRON:%=.cache/megatron/%/.done)
MEGATRON_FULL_DIRS := $(MEGATRON_FULL:%=.cache/megatron/%/.done)

.PHONY: demo bench bench-full test test-full lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo .cache/megatron/0.19.2/.done
	PYTHONPATH=.cache/megatron/0.19.2 $(BIN)/python examples/demo.py

bench: $(VENV)/.demo
	$(BIN)/python examples/bench.py

bench-full: $(VENV)/.demo
	$(BIN)/python examples/bench.py --full

test: lint $(MEGATRON_DIRS)
	$(BIN)/python -m pytest $(PARALLEL) -m "not full"

test-full: lint $(MEGATRON_FULL_DIRS)
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch first: whatever asks for it later finds this CPU build and fetches no other.
$(VENV)/.torch:
	@echo "setting up $(VENV): torch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch setup.py
	@echo "setting up $(VENV): the demo's packages"
	$(PIP) -e ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.torch setup.py
	@echo "setting up $(VENV): the tests' packages"
	$(PIP) -e ".[test]"
	touch $@

# Megatron asks for some sixty packages of which a CPU run needs none, and for a newer Python than its wheels do.
.cache/megatron/%/.done: | $(VENV)/.torch
	@echo "fetching megatron-core $*"
	$(PIP) --no-deps --ignore-requires-python --target .cache/megatron/$* megatron-core==$*
	touch $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
