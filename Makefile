# Every target that has a "## " comment is printed by plain `make`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SPARK_READY := $(VENV)/.spark-ready
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

$(SPARK_READY): $(READY) requirements-spark.lock
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-spark.lock
	@touch $@

COMPILE := $(BIN)/python -m uv pip compile pyproject.toml --universal --python-version 3.11 \
  --generate-hashes --no-annotate --custom-compile-command 'make lock' --quiet

.PHONY: lock
lock: $(READY) ## Resolve the dependencies again into requirements*.lock
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) --extra dev -o requirements.lock
	$(COMPILE) --extra dev --extra spark -c requirements.lock -o requirements-spark.lock

.PHONY: protos
protos: $(READY) ## Generate percolator/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. protos/percolator/v1/*.proto

# ------------------------------------------------------------------------------ checks

SOURCES := percolator services tests benchmarks examples

.PHONY: format
format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

.PHONY: lint
lint: $(READY) ## Style of code and protos, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint
	$(BIN)/lint-imports --no-cache

.PHONY: types
types: $(READY) ## mypy, strict
	$(BIN)/mypy $(SOURCES)

.PHONY: check
check: lint types ## lint, types, import contracts, stub freshness, dead links in docs
	$(BIN)/python -m pytest -q tests/unit/repository

# ------------------------------------------------------------------------------ tests

PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider

.PHONY: test
test: $(READY) ## Everything that needs neither Java nor Docker (at most 3 minutes)
	$(PYTEST) -n $(TEST_WORKERS) --dist loadfile -m "not chaos" --ignore=tests/spark tests

.PHONY: test-fast
test-fast: $(READY) ## Only what runs inside one process (at most 1 minute)
	$(PYTEST) -n $(TEST_WORKERS) --dist loadfile -m "not integration and not chaos" --ignore=tests/spark tests

.PHONY: test-spark
test-spark: $(SPARK_READY) ## The library inside Spark executors (needs Java 17)
	@tests/spark/ensure-java
	$(PYTEST) -m spark tests/spark

# ------------------------------------------------------------------------------ simulation

SEEDS ?= 100
SEED ?=
JOBS ?= 2

.PHONY: simulate
simulate: $(READY) ## Whole clusters on virtual time, among faults (SEEDS=100, SEED=any, JOBS=2)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

.PHONY: planted-bugs
planted-bugs: $(READY) ## Plants bugs into the product, each of which a simulation has to find
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation.planted_bugs

.PHONY: chaos
chaos: $(READY) ## Hurt a cluster of processes in every way, for CHAOS_SECONDS (90), and check it
	$(BIN)/python -m pytest -q -s -p no:cacheprovider -m chaos tests/chaos

# ------------------------------------------------------------------------------ benchmarks

.PHONY: bench
bench: bench-oracle bench-tablet bench-transactions bench-failover ## Every benchmark, one after another

.PHONY: bench-oracle
bench-oracle: $(READY) ## Timestamps per second
	$(BIN)/python -m benchmarks.oracle

.PHONY: bench-tablet
bench-tablet: $(READY) ## What a row costs a tablet server and its client (about 3 minutes)
	$(BIN)/python -m benchmarks.tablet

.PHONY: bench-failover
bench-failover: $(READY) ## Throughput while a tablet server is killed; many tablets (about a minute)
	$(BIN)/python -m benchmarks.failover

.PHONY: bench-transactions
bench-transactions: $(READY) ## What a transaction costs, beside raw operations (about 3 minutes)
	$(BIN)/python -m benchmarks.transactions

# ------------------------------------------------------------------------------ clusters

.PHONY: demo
demo: $(READY) ## Start a cluster of processes, use it, kill servers, show that nothing is lost
	$(BIN)/python -m examples.demo

DATA ?= var/cluster

.PHONY: cluster-up
cluster-up: $(READY) ## Start a local cluster in the background (DATA=var/cluster)
	$(BIN)/python -m services.local up --data $(DATA) --detach

.PHONY: cluster-down
cluster-down: $(READY) ## Stop it; its data stays
	$(BIN)/python -m services.local down --data $(DATA)

.PHONY: clean
clean: ## Remove everything that can be made again, except the data of clusters
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
