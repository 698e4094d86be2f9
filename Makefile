# Every target that has a "## " comment is printed by plain `make`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_WORKERS ?= 2

.DEFAULT_GOAL := help

.PHONY: help
help: ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*## "} {printf "  %-18s %s\n", $$1, $$2}'

# ------------------------------------------------------------------------------ set-up

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

.PHONY: setup
setup: $(READY) ## Make .venv with the locked dependencies

.PHONY: lock
lock: ## Resolve the dependencies again into requirements.lock
	$(PYTHON) -m pip install --quiet uv
	$(PYTHON) -m uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --custom-compile-command 'make lock' --quiet -o requirements.lock

.PHONY: protos
protos: $(READY) ## Generate percolator/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. protos/percolator/v1/*.proto
