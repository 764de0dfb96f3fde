# Everything a person or CI does with this checkout. `make` alone lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit chaos lock clean bench peers

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/' | expand -t 12

setup: $(STAMP) ## create .venv with everything pinned by requirements.lock

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("FlowFabric needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: setup ## a small real application: two workers, one killed mid-task, every result once
	$(BIN)/python -m examples.demo

test: lint types unit ## everything CI runs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/basedpyright

unit: setup
	$(BIN)/python -m pytest -n 2 -m "not chaos"

chaos: setup ## the long failure runs
	$(BIN)/python -m pytest -m chaos --timeout 900

bench: setup ## the headline figures on this machine
	$(BIN)/flowfabric bench lifecycle

peers: setup ## the same no-op workload on other Python queues
	$(BIN)/python -m benchmarks.peers

lock: setup ## renew requirements.lock from pyproject.toml
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --generate-hashes --no-header --no-annotate --universal --python-version 3.11 \
		--group dev pyproject.toml -o requirements.lock

clean: ## remove the environment and all caches
	rm -rf $(VENV) .venv-peers .pytest_cache .ruff_cache .hypothesis .flowfabric
