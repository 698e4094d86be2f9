# Every target that has a "## " comment is printed by plain `make`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SPARK_READY := $(VENV)/.spark-ready
TEST_WORKERS ?= 2

# Where the surroundings forbid it, each process of a test would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

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
	$(COMPILE) --extra services -c requirements.lock -o requirements-services.lock

.PHONY: protos
protos: $(READY) ## Generate percolator/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. protos/percolator/v1/*.proto

# ------------------------------------------------------------------------------ checks

SOURCES := percolator pyspark_percolator services tests benchmarks examples

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
# In the order of tests/conftest.py: by itself it leaves files of few tests, the longest, for the end.
BY_FILE = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# These have targets of their own.
ELSEWHERE := --ignore=tests/spark --ignore=tests/rust --ignore=tests/packaging

.PHONY: test
# Whoever starts processes waits for them, while a third worker has the cores.
test: TEST_WORKERS := 3
test: $(READY) ## Everything that needs neither Java, Rust nor Docker (about 3 minutes)
	$(PYTEST) $(BY_FILE) -m "not chaos" $(ELSEWHERE) tests

.PHONY: test-fast
test-fast: $(READY) ## Only what runs inside one process (about a minute)
	$(PYTEST) $(BY_FILE) -m "not integration and not chaos" $(ELSEWHERE) tests

.PHONY: test-spark
test-spark: $(SPARK_READY) ## The library inside Spark executors (needs Java 17)
	@tests/spark/ensure-java
	$(PYTEST) -m spark tests/spark

RUST_TARGET ?= $(CURDIR)/var/rust

.PHONY: test-rust
test-rust: $(READY) ## The example client in Rust (needs cargo; the first time builds for a minute)
	@tests/rust/ensure-cargo
	cd examples/rust_client && CARGO_TARGET_DIR=$(RUST_TARGET) cargo test --locked --quiet
	CARGO_TARGET_DIR=$(RUST_TARGET) $(PYTEST) -m rust tests/rust

# ------------------------------------------------------------------------------ simulation

SEEDS ?= 100
SEED ?=
JOBS ?= 2

.PHONY: simulate
simulate: $(READY) ## Whole clusters on virtual time, among faults (SEEDS=100, SEED=any, JOBS=2)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

.PHONY: planted-bugs
planted-bugs: $(READY) ## Plants bugs into the product, each of which a simulation has to find
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation.planting

.PHONY: chaos
chaos: $(READY) ## Hurt a cluster of processes in every way, for CHAOS_SECONDS (90), and check it
	$(BIN)/python -m pytest -q -s -p no:cacheprovider -m chaos tests/chaos tests/integration

.PHONY: compose-test
compose-test: $(READY) ## Hurt a cluster of containers from outside, and check it (needs Docker)
	$(MAKE) --no-print-directory image BASE_IMAGE=$$(tests/containers/base-image)
	$(BIN)/python -m pytest -q -s -p no:cacheprovider tests/containers

# ------------------------------------------------------------------------------ benchmarks

.PHONY: bench
bench: bench-oracle bench-tablet bench-transactions bench-observers bench-gc bench-gateway bench-failover ## Every benchmark of the cluster, one after another (Spark and the simulation have their own)

.PHONY: bench-oracle
bench-oracle: $(READY) ## Timestamps per second
	$(BIN)/python -m benchmarks.oracle

.PHONY: bench-tablet
bench-tablet: $(READY) ## What a row costs a tablet server and its client (about 3 minutes)
	$(BIN)/python -m benchmarks.tablet

.PHONY: bench-failover
bench-failover: $(READY) ## Throughput while a tablet server is killed; many tablets (about a minute)
	$(BIN)/python -m benchmarks.failover

.PHONY: bench-simulation
bench-simulation: $(READY) ## What a simulated seed and its transactions cost (about a minute)
	PYTHONHASHSEED=0 $(BIN)/python -m benchmarks.simulation

.PHONY: bench-gc
bench-gc: $(READY) ## Reads and store size while cells are overwritten for ever; export and import (about 5 minutes)
	$(BIN)/python -m benchmarks.collection

.PHONY: bench-gateway
bench-gateway: $(READY) ## What passing calls on costs, and transactions of other languages
	$(BIN)/python -m benchmarks.gateway

.PHONY: bench-observers
bench-observers: $(READY) ## Observer runs per second, how soon they come, what an idle worker costs
	$(BIN)/python -m benchmarks.observers

.PHONY: bench-spark
bench-spark: $(SPARK_READY) ## Rows per second between Spark and a cluster (needs Java 17; about 3 minutes)
	@tests/spark/ensure-java
	$(BIN)/python -m benchmarks.spark

.PHONY: bench-incremental
bench-incremental: $(SPARK_READY) ## How soon a changed document is served, beside a Spark batch job over all (needs Java 17; about 20 minutes)
	@tests/spark/ensure-java
	$(BIN)/python -m benchmarks.incremental

.PHONY: bench-transactions
bench-transactions: $(READY) ## What a transaction costs, beside raw operations (about 3 minutes)
	$(BIN)/python -m benchmarks.transactions

.PHONY: figures
figures: $(READY) ## Put the figures of the last benchmarks into README.md
	$(BIN)/python -m benchmarks.figures

# ------------------------------------------------------------------------------ wheel, documents

.PHONY: wheel
wheel: $(READY) ## Build dist/percolator_store-*.whl, and try it where nothing else is installed
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build
	$(PYTEST) tests/packaging

.PHONY: docs
docs: $(READY) ## Pages of all documents and of the API, in var/docs; a dead link is an error
	rm -rf var/docs var/doctrees
	$(BIN)/sphinx-build --builder html --conf-dir docs/site --doctree-dir var/doctrees \
	  --fail-on-warning --keep-going --quiet . var/docs
	@echo var/docs/index.html

# ------------------------------------------------------------------------------ examples

.PHONY: example-bank
example-bank: $(READY) ## Threads transfer money, others check that none is lost (10 s)
	$(BIN)/python -m examples python -m examples.bank

.PHONY: example-counter-view
example-counter-view: $(READY) ## Sums of orders, kept up to date by an observer (5 s)
	$(BIN)/python -m examples python -m examples.counter_view

.PHONY: example-webindex
example-webindex: $(READY) ## A crawl, indexed by observers: duplicates, links, canonical pages
	$(BIN)/python -m examples --observers examples.webindex.observers:observers bash -ec \
	  'python -m examples.webindex.load --documents 300 --updates 30 --deletions 15; \
	  percolator wait; percolator scan serving --limit 5'

.PHONY: example-rust
example-rust: $(READY) ## The bank in Rust, through a gateway (needs cargo; builds for a minute)
	@tests/rust/ensure-cargo
	CARGO_TARGET_DIR=$(RUST_TARGET) $(BIN)/python -m examples bash -c \
	  'cargo run --locked --quiet --manifest-path examples/rust_client/Cargo.toml -- $$PERCOLATOR_GATEWAY'

# ------------------------------------------------------------------------------ clusters

.PHONY: demo
demo: $(READY) ## The paper's index of web pages, a killed server, and a check of it all (KEEP=1 goes on)
	$(BIN)/python -m examples.demo

DATA ?= var/cluster
GATEWAYS ?= 1

.PHONY: cluster-up
cluster-up: $(READY) ## Start a local cluster in the background (DATA=var/cluster, GATEWAYS=1)
	$(BIN)/python -m services.local --data $(DATA) --gateways $(GATEWAYS) --detach

.PHONY: cluster-down
cluster-down: $(READY) ## Stop it; its data stays
	$(BIN)/python -m services.local down --data $(DATA)

CERTIFICATES ?= var/certificates

.PHONY: certs
certs: $(READY) ## An authority and certificates for development, below CERTIFICATES (var/certificates)
	$(BIN)/python -m services.local.authority $(CERTIFICATES)

.PHONY: image
image: ## Build the image of all services (BASE_IMAGE=, where the default cannot be had)
	docker build $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) -f deploy/Dockerfile -t percolator:local .

.PHONY: clean
clean: ## Remove everything that can be made again, except the data of clusters
	rm -rf $(VENV) build dist var/docs var/doctrees var/rust *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
