# Everything a person or CI does with this checkout. `make` alone lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WHEELS := .wheels
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
COMPILE := $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate \
	--universal --python-version 3.11
PEERS := $(wildcard benchmarks/peers/*.in)

# With packages kept by `make wheels`, nothing is asked of the network.
OFFLINE := $(if $(wildcard $(WHEELS)/*.whl),--no-index --find-links $(WHEELS))

# Without compiled files, each command that a test starts compiles half the package: 0.2 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit chaos bench peers lock wheels pages library clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/' | expand -t 12

setup: $(STAMP) ## create .venv with everything pinned by requirements.lock

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "FlowFabric needs Python 3.11 or newer: install it, or name one with 'make PYTHON=/path/to/python'"; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "FlowFabric needs Python 3.11 or newer, and this is $$($(PYTHON) --version 2>&1)."; \
		echo "Name a newer one: make PYTHON=python3.13"; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "This Python lacks the venv module. On Debian and Ubuntu: apt install python3-venv"; \
		exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing what requirements.lock pins (once, about half a minute)"
	@$(PIP) install $(OFFLINE) --require-hashes -r requirements.lock
	@$(PIP) install --no-index --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

demo: setup ## a small real application: two workers, one killed mid-task, every result once
	@$(BIN)/python -m examples.demo

test: lint types unit ## everything CI runs

lint: setup ## style and format
	@echo "ruff check, ruff format --check"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: setup ## strict type check
	@echo "basedpyright"
	@$(BIN)/basedpyright

unit: setup ## every test but the long failure runs
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not chaos"

chaos: setup ## the long failure runs
	$(BIN)/python -m pytest -m chaos --timeout 900

bench: setup ## the headline figures on this machine
	$(BIN)/flowfabric bench lifecycle

peers: setup ## the same no-op workload on other Python queues
	$(BIN)/python -m benchmarks.peers

lock: setup ## renew requirements.lock, its own tool's and the peers' lock files
	$(PIP) install --require-hashes -r requirements-uv.lock
	$(COMPILE) --group dev pyproject.toml -o requirements.lock
	$(COMPILE) --group lock -o requirements-uv.lock
	$(foreach source,$(PEERS),$(COMPILE) $(source) -o $(source:.in=.lock) &&) true

wheels: setup ## keep every package in .wheels, so that `make setup` works offline
	$(PIP) download --require-hashes -r requirements.lock -d $(WHEELS)
	@echo '*' > $(WHEELS)/.gitignore

pages: setup ## write the generated pages of docs/reference again
	$(BIN)/python docs/generate.py

library: setup ## note a changed Lua interface: raises the library version
	$(BIN)/python -m tests.project.interface

clean: ## remove the environment, caches and the embedded engine's data; .wheels stays
	rm -rf $(VENV) .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .flowfabric
