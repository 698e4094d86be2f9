# Plain `make` prints every target that has a "## " comment.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SPARK_READY := $(VENV)/.spark-ready
PROTOS_VENV := $(VENV)/protos
PROTOS_READY := $(PROTOS_VENV)/.ready
SPARK_CLASSES := $(VENV)/spark-classes.jsa
TEST_WORKERS ?= 2

# If the environment forbids bytecode files, each process of a test would compile all its imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help

.PHONY: help
help: ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*## "} {printf "  %-18s %s\n", $$1, $$2}'

# ------------------------------------------------------------------------------ set-up

$(READY): pyproject.toml requirements/dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

.PHONY: setup
setup: $(READY) $(PROTOS_READY) ## Create .venv with the locked dependencies

$(SPARK_READY): $(READY) requirements/spark.lock
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/spark.lock
	@touch $@

$(SPARK_CLASSES): $(SPARK_READY) tests/spark/class_archive.py
	@tests/spark/ensure-java
	$(BIN)/python -m tests.spark.class_archive $@ > $@.log 2>&1 || { cat $@.log; exit 1; }

$(PROTOS_READY): $(READY) requirements/protos.lock
	$(PYTHON) -m venv $(PROTOS_VENV)
	$(PROTOS_VENV)/bin/python -m pip install --quiet --require-hashes -r requirements/protos.lock
	@touch $@

COMPILE := $(BIN)/python -m uv pip compile --universal --python-version 3.11 \
  --generate-hashes --no-annotate --custom-compile-command 'make lock' --quiet

.PHONY: lock
lock: $(READY) ## Resolve the dependencies into requirements/
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) pyproject.toml --extra dev -o requirements/dev.lock
	$(COMPILE) pyproject.toml --extra dev --extra spark -c requirements/dev.lock -o requirements/spark.lock
	$(COMPILE) pyproject.toml --extra server -c requirements/dev.lock -o requirements/services.lock
	$(COMPILE) --group pyproject.toml:image -c requirements/dev.lock -o requirements/image.lock
	$(COMPILE) --group pyproject.toml:protos -o requirements/protos.lock

.PHONY: protos
protos: $(PROTOS_READY) ## Generate percolator/v1 from protos/
	$(PROTOS_VENV)/bin/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. protos/percolator/v1/*.proto

.PHONY: blocking
blocking: $(READY) ## Generate percolator/blocking/api.py from percolator/aio
	$(BIN)/python -m tools.blocking_api

# ------------------------------------------------------------------------------ checks

SOURCES := percolator pyspark_percolator tests benchmarks examples tools

.PHONY: format
format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

.PHONY: lint
lint: $(READY) ## Check the style of code and protos, and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint
	$(BIN)/lint-imports --no-cache

.PHONY: types
types: $(READY) ## Check types with mypy, strict
	$(BIN)/mypy $(SOURCES)

.PHONY: check
check: lint types $(PROTOS_READY) ## Run lint and types, and check import contracts, generated stubs and links
	$(BIN)/python -m pytest -q tests/unit/repository

# ------------------------------------------------------------------------------ tests

PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider
# tests/conftest.py says which tests stay together, and in which order: xdist would run the
# groups with few tests, the slowest, last.
SPREAD = -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
# These have their own targets.
ELSEWHERE := --ignore=tests/spark --ignore=tests/unit/spark --ignore=tests/rust --ignore=tests/packaging --ignore=tests/release

.PHONY: test
# Tests that start processes wait for them; a third worker uses the cores meanwhile.
test: TEST_WORKERS := 3
test: $(READY) $(PROTOS_READY) ## Run everything that needs neither Java, Rust nor Docker (several minutes)
	$(PYTEST) $(SPREAD) -m "not chaos and not bigtable and not bucket and not spark" $(ELSEWHERE) tests

.PHONY: test-fast
test-fast: $(READY) $(PROTOS_READY) ## Run only what runs inside one process (a few minutes)
	$(PYTEST) $(SPREAD) -m "not integration and not chaos and not bigtable and not bucket and not spark" $(ELSEWHERE) tests

NEWEST := var/newest
# Each dependency of users is called directly by one of these.
USES_DEPENDENCIES := $(addprefix tests/unit/,wire chassis tabletserver backup bigtable cli lockservice) \
  tests/integration/test_workers.py

.PHONY: test-newest
test-newest: ## Test with the newest versions that pyproject.toml allows, not the locked ones (about 3 minutes)
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet -e '.[dev]'
	$(NEWEST)/bin/python -m pip list --format=freeze
	$(NEWEST)/bin/python -m pytest -q -p no:cacheprovider $(SPREAD) -m "not chaos" $(USES_DEPENDENCIES)

.PHONY: test-spark
test-spark: $(SPARK_CLASSES) ## Test the library inside Spark executors (needs Java 17)
	@tests/spark/ensure-java
	$(PYTEST) $(SPREAD) -m "(spark or not integration) and not bigtable" tests/spark tests/unit/spark tests/integration/test_history.py

RUST_TARGET ?= $(CURDIR)/var/rust

.PHONY: test-rust
test-rust: $(READY) ## Test the example client in Rust (needs cargo; the first build takes a minute)
	@tests/rust/ensure-cargo
	cd examples/rust_client && CARGO_TARGET_DIR=$(RUST_TARGET) cargo test --locked --quiet
	CARGO_TARGET_DIR=$(RUST_TARGET) $(PYTEST) -m rust tests/rust

.PHONY: emulator
emulator: ## Build Google's emulator of Bigtable from Debian's packages, installing none (about a minute)
	@tests/bigtable/build-emulator var/bigtable

.PHONY: test-bigtable
test-bigtable: $(SPARK_CLASSES) emulator ## Test the cells in Bigtable's emulator (needs apt, once, and Java 17)
	@tests/spark/ensure-java
	$(PYTEST) $(SPREAD) -m bigtable tests/contracts tests/bigtable tests/spark

.PHONY: test-bucket
test-bucket: $(READY) ## Test buckets on a Ceph of its own, whose parts are killed (installs Debian's packages; 5 minutes)
	@tests/bucket/ensure-ceph
	$(PYTEST) -m bucket --timeout 180 --durations 5 tests/contracts/test_bucket.py tests/contracts/test_coordinator.py tests/bucket

# ------------------------------------------------------------------------------ simulation

SEEDS ?= 100
SEED ?=
JOBS ?= 2

.PHONY: simulate
simulate: $(READY) ## Simulate whole clusters in virtual time, with faults (SEEDS=100, SEED=any, JOBS=2)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

BUGS ?=

.PHONY: planted-bugs
planted-bugs: $(READY) ## Plant bugs in the product, each of which a simulation must find (BUGS=--slow: those that make test leaves out)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation.planting $(BUGS)

# It measures how soon everything works again, so it runs alone.
ALL_FAULTS := tests/chaos/test_chaos.py::test_no_promise_is_broken_whatever_faults_meet

.PHONY: chaos
ifeq ($(STORE),bucket)
chaos: $(READY)
	@tests/bucket/ensure-ceph
	STORE=bucket $(PYTEST) -s $(ALL_FAULTS)
else
chaos: $(READY) ## Inject many faults into a cluster of processes at once, for CHAOS_SECONDS (90), and check it (STORE=bucket: on a Ceph)
	$(if $(STORE),$(error STORE=$(STORE): expected bucket, or nothing))
	$(PYTEST) -s $(ALL_FAULTS)
	$(PYTEST) $(SPREAD) -m chaos --deselect $(ALL_FAULTS) tests/chaos tests/integration
endif

SOAK_MINUTES ?= 30

.PHONY: soak
soak: $(READY) ## Work steadily on a cluster of processes for SOAK_MINUTES (30): does everything level off?
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

FUZZ_SECONDS ?= 60
FUZZ_SEED ?=

.PHONY: fuzz
fuzz: $(READY) ## Give hostile input to every method and every file for FUZZ_SECONDS (60), FUZZ_SEED=any
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

.PHONY: recovery
recovery: $(READY) ## Record how soon everything worked again in chaos runs, in docs/operating.md
	$(BIN)/python -m tests.chaos.supervisor

.PHONY: compose-test
compose-test: $(READY) ## Disturb a cluster of containers from outside, and check it (needs Docker)
	@tests/containers/ensure-engine
	$(MAKE) --no-print-directory image image-emulator BASE_IMAGE=$$(tests/containers/base-image)
	$(BIN)/python -m pytest -q -s -p no:cacheprovider tests/containers

# ------------------------------------------------------------------------------ benchmarks

.PHONY: bench
bench: bench-loads bench-oracle bench-tablet bench-transactions bench-small bench-contention bench-observers bench-gc bench-gateway bench-failover ## Run all cluster benchmarks one after another (not Spark, not the simulation)

.PHONY: bench-oracle
bench-oracle: $(READY) ## Measure timestamps per second
	$(BIN)/python -m benchmarks.oracle

.PHONY: bench-tablet
bench-tablet: $(READY) ## Measure what a row costs a tablet server and its client (about 3 minutes)
	$(BIN)/python -m benchmarks.tablet

.PHONY: bench-bulk-loads
bench-bulk-loads: $(READY) ## Measure commits of other rows while a range of their tablet is loaded (about a minute)
	$(BIN)/python -m benchmarks.bulk_loads

.PHONY: bench-bucket
bench-bucket: $(READY) ## Measure a cluster whose data is in a bucket, next to a directory: requests, rates, failover (PARTS="traffic idle" runs parts; all take about 15 minutes)
	$(BIN)/python -m benchmarks.bucket $(PARTS)

.PHONY: bench-changes
bench-changes: $(READY) ## Measure what a change feed costs, and that its reading does not depend on the table (about 8 minutes)
	$(BIN)/python -m benchmarks.change_feed

.PHONY: bench-failover
bench-failover: $(READY) ## Measure throughput while a tablet server is killed; failover of many tablets (about a minute)
	$(BIN)/python -m benchmarks.failover

.PHONY: bench-simulation
bench-simulation: $(READY) ## Measure what a simulated seed and its transactions cost (about a minute)
	PYTHONHASHSEED=0 $(BIN)/python -m benchmarks.simulation

.PHONY: bench-gc
bench-gc: $(READY) ## Measure reads and store size while cells are overwritten forever; export and import (about 5 minutes)
	$(BIN)/python -m benchmarks.collection

.PHONY: bench-gateway
bench-gateway: $(READY) ## Measure the cost of forwarding calls, and of transactions from other languages
	$(BIN)/python -m benchmarks.gateway

.PHONY: bench-bigtable
bench-bigtable: $(READY) emulator ## Measure transactions and observers on a row store, next to tablet servers (about 8 minutes)
	$(BIN)/python -m benchmarks.bigtable
	$(BIN)/python -m benchmarks.row_observers

.PHONY: bench-loads
bench-loads: $(READY) ## Measure the loads that people have, next to PostgreSQL: transfers, observed changes, overload (about 10 minutes)
	$(BIN)/python -m benchmarks.loads

.PHONY: bench-moving
bench-moving: $(READY) emulator ## Move a million cells from tablet servers into Bigtable's emulator, and compare (about 2 minutes)
	$(BIN)/python -m benchmarks.moving

.PHONY: bench-observers
bench-observers: $(READY) ## Measure observers: runs per second, delay, an idle worker; then hot cells in each way (about 4 minutes)
	$(BIN)/python -m benchmarks.observers
	$(BIN)/python -m benchmarks.recipes

.PHONY: bench-recipes
bench-recipes: $(READY) ## Measure only hot cells: counters and a trie in each way, a storm, edges at one node (about 2 minutes)
	$(BIN)/python -m benchmarks.recipes

.PHONY: trace-paths
trace-paths: $(READY) ## Count the files and lines that one operation runs, in all processes (about a minute)
	$(BIN)/python -m benchmarks.trace_paths

.PHONY: bench-small
bench-small: $(READY) ## Measure a small program: 8 threads, on many rows and all on one (about 1 minute)
	$(BIN)/python -m benchmarks.small_programs

.PHONY: bench-revisions
bench-revisions: $(READY) $(PROTOS_READY) ## Compare with an earlier revision in one run: a storm of increments, a chain of observers, a web index (REVISION=27d3539 DOCUMENTS=20000; about 6 minutes)
	$(BIN)/python -m benchmarks.revisions $(if $(REVISION),--revision $(REVISION)) $(if $(DOCUMENTS),--documents $(DOCUMENTS))

.PHONY: bench-messages
bench-messages: $(READY) ## Measure what a message and its answer cost, over gRPC and in frames (about a minute)
	$(BIN)/python -m benchmarks.message_kinds

.PHONY: bench-contention
bench-contention: $(READY) ## Measure transactions that fight over few cells: what they cost, and how long they wait (about 3 minutes)
	$(BIN)/python -m benchmarks.contention

.PHONY: bench-spark
bench-spark: $(SPARK_READY) ## Measure rows per second between Spark and a cluster, next to Parquet and PostgreSQL (needs Java 17; PARTS="append scan" runs parts; all take about 6 minutes)
	@tests/spark/ensure-java
	$(BIN)/python -m benchmarks.spark $(PARTS)

.PHONY: bench-job-readers
bench-job-readers: $(READY) ## Measure readers while an atomic job locks what they read (about a minute; ROWS=10000000 shows how large a job may be)
	$(BIN)/python -m benchmarks.job_readers $(if $(ROWS),--rows $(ROWS))

.PHONY: bench-incremental
bench-incremental: $(SPARK_READY) ## Compare observers with a Spark batch job: how soon is a change served? (needs Java 17; about 20 minutes)
	@tests/spark/ensure-java
	$(BIN)/python -m benchmarks.incremental

.PHONY: bench-transactions
bench-transactions: $(READY) ## Measure what a transaction costs, compared with raw operations (about 3 minutes)
	$(BIN)/python -m benchmarks.transactions

.PHONY: figures
figures: $(READY) ## Record the benchmark runs of the reference machine in benchmarks/results and README.md
	$(BIN)/python -m benchmarks.figures

# ------------------------------------------------------------------------------ wheel, documents

.PHONY: wheel
wheel: $(READY) ## Build dist/percolator_store-*.whl, and try it where nothing else is installed
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build
	$(PYTEST) tests/packaging

.PHONY: release
release: wheel ## Build and check wheel, source distribution and image of a release (needs Docker)
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > /dev/null
	@tests/containers/ensure-engine
	$(MAKE) --no-print-directory image BASE_IMAGE=$$(tests/containers/base-image)
	$(PYTEST) tests/release tests/compatibility
	@ls dist

.PHONY: docs
docs: $(READY) ## Build pages of all documents and of the API in var/docs; a dead link is an error
	rm -rf var/docs var/doctrees
	$(BIN)/sphinx-build --builder html --conf-dir docs/site --doctree-dir var/doctrees \
	  --fail-on-warning --keep-going --quiet . var/docs
	@echo var/docs/index.html

# ------------------------------------------------------------------------------ examples

.PHONY: example-bank
example-bank: $(READY) ## Threads transfer money while others check that none is lost (10 s)
	$(BIN)/python -m examples python -m examples.bank

.PHONY: example-counter-view
example-counter-view: $(READY) ## An observer keeps sums of orders up to date (5 s)
	$(BIN)/python -m examples python -m examples.counter_view

.PHONY: example-shop
example-shop: $(READY) ## Orders take from the stock, and observers keep the best sellers (5 s)
	$(BIN)/python -m examples --observers examples.shop:observers python -m examples.shop

.PHONY: example-webindex
example-webindex: $(READY) ## Observers index a crawl: duplicates, links, canonical pages
	$(BIN)/python -m examples --observers examples.webindex.observers:observers bash -ec \
	  'python -m examples.webindex.load --documents 300 --updates 30 --deletions 15; \
	  percolator wait; percolator scan serving --limit 5'

.PHONY: example-rust
example-rust: $(READY) ## The bank in Rust, through a gateway (needs cargo; the build takes a minute)
	@tests/rust/ensure-cargo
	CARGO_TARGET_DIR=$(RUST_TARGET) $(BIN)/python -m examples bash -c \
	  'cargo run --locked --quiet --manifest-path examples/rust_client/Cargo.toml -- $$PERCOLATOR_GATEWAY'

# ------------------------------------------------------------------------------ clusters

.PHONY: demo
ifeq ($(STORE),bigtable)
demo: $(READY) emulator
	$(if $(KEEP),$(error KEEP: the emulator, and all that is in it, ends with the demo))
	$(BIN)/python -m tests.bigtable.emulator_process $(BIN)/python -m examples.demo --store bigtable://percolator/percolator
else ifeq ($(STORE),bucket)
demo: $(READY)
	$(if $(KEEP),$(error KEEP: Ceph, and all that is in it, ends with the demo))
	@tests/bucket/ensure-ceph
	PERCOLATOR_UNFINISHED_BUCKETS=1 $(BIN)/python -m tests.bucket.ceph \
	  bash -c '$(BIN)/python -m examples.demo --store "$$PERCOLATOR_TEST_BUCKET"'
else
demo: $(READY) ## The paper's index of web pages, with a killed server and a check of the result (KEEP=1 keeps it running; STORE=bigtable, STORE=bucket: on an emulator, on a Ceph)
	$(if $(STORE),$(error STORE=$(STORE): expected bigtable, bucket, or nothing))
	$(BIN)/python -m examples.demo
endif

DATA ?= .percolator
GATEWAYS ?= 1

.PHONY: cluster-up
cluster-up: $(READY) ## Start a local cluster in the background (DATA=.percolator, GATEWAYS=1)
	$(BIN)/percolator dev --data $(DATA) --gateways $(GATEWAYS) --detach

.PHONY: cluster-down
cluster-down: $(READY) ## Stop it; the data stays
	$(BIN)/percolator dev down --data $(DATA)

CERTIFICATES ?= var/certificates

.PHONY: certs
certs: $(READY) ## Create an authority and certificates for development (CERTIFICATES=var/certificates)
	$(BIN)/percolator certs $(CERTIFICATES) --yes

.PHONY: image
image: ## Build the image of all services (BASE_IMAGE= replaces the default base image)
	docker build $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) -f deploy/Dockerfile -t percolator:local .

.PHONY: image-emulator
image-emulator: emulator ## Build the image of Bigtable's emulator, for deploy/compose.bigtable.yaml
	docker build -f deploy/emulator.Dockerfile -t percolator-emulator:local var/bigtable

.PHONY: clean
clean: ## Remove everything that can be made again, except cluster data
	rm -rf $(VENV) build dist var/docs var/doctrees var/rust *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
