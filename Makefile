# `make demo` and `make test` do everything on a fresh machine with Python 3.11 and make.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests and the demo run models of a few milliseconds a step: one thread each beats many.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: help install demo test test-fast check format proto

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(STAMP) ## Create the virtual environment and install everything

$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP) ## Serve the embedded model, train it over gRPC, and write demo-out/report.html
	$(BIN)/python examples/demo.py

test: $(STAMP) ## All tests
	$(BIN)/python -m pytest

test-fast: $(STAMP) ## The tests for your own loop: under 90 seconds
	$(BIN)/python -m pytest -m "not slow"

check: $(STAMP) ## Lint, types, import rules, protocol
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/baseline.binpb
	PATH="$(CURDIR)/$(BIN):$$PATH" proto/check_generated.sh

format: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## Regenerate the Python code of the protocol
	PATH="$(CURDIR)/$(BIN):$$PATH" proto/generate.sh
