# `make help` lists the targets. Each does what it needs first: a fresh clone and one target are enough.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make this checkout ready: Debian packages, .tools/, .venv/, the tiny model
	@scripts/setup

.PHONY: check
check: setup ## format, lint, types, direction of imports, shell syntax, entries of the mutants
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	for script in scripts/setup scripts/fresh deploy/etcd/start deploy/etcd/roles deploy/etcd/restore .ci/run; do bash -n $$script || exit 1; done
	$(PYTHON) scripts/mutants.py --check

.PHONY: test
test: setup ## every test; T='tests/unit -k word' for some
	$(PYTHON) -m pytest $(T)

.PHONY: mutants
mutants: setup ## one small bug at a time, each must be noticed; M='--only A-01' for some
	$(PYTHON) scripts/mutants.py $(M)

.PHONY: soak
soak: soak-sim soak-property ## everything that is run for hours: many more seeds, many more clusters

.PHONY: soak-sim
soak-sim: setup ## storms of the simulation on all cores; SEEDS=5000 FROM=0
	$(PYTHON) scripts/soak_sim.py --seeds $(or $(SEEDS),5000) --from $(or $(FROM),0)

.PHONY: soak-property
soak-property: setup ## the properties of the core on 20,000 random clusters, seeds printed; S='--clusters 1000 --seed 1'
	$(PYTHON) scripts/soak_property.py $(S)

.PHONY: bench-store
bench-store: setup ## calls a second and the cost of a long listing, on an etcd of its own; B='--members 1'
	$(PYTHON) bench/store.py $(B)

.PHONY: bench-gateway
bench-gateway: setup ## CPU of a request and of a streamed chunk, beside HAProxy's; B='--rounds 3'
	$(PYTHON) bench/gateway.py $(B)

.PHONY: bench-sim
bench-sim: setup ## virtual seconds of a storm a second, 3 controllers and 50 nodes; B='--nodes 5'
	$(PYTHON) bench/sim.py $(B)

.PHONY: bench-placement
bench-placement: setup ## placements a second, passes and memory of fleets up to 10,000 nodes; B='--nodes 1000'
	$(PYTHON) bench/placement.py $(B)

.PHONY: demo
demo: setup ## a cluster on this machine, a real model, a streamed answer, and a leader killed during another
	@scripts/setup --check-engine
	$(PYTHON) scripts/demo

.PHONY: chaos
chaos: setup ## kill leaders, agents, engines and etcd of a cluster with the durations of production
	$(PYTHON) chaos/run.py

.PHONY: fresh
fresh: ## `make test` of HEAD in a new Debian (debootstrap chroot; needs root)
	scripts/fresh

.PHONY: lock
lock: ## resolve requirements.lock anew from pyproject.toml (UV=… where uv is not on PATH)
	$(or $(UV),uv) pip compile --quiet --universal --python-version 3.11 --generate-hashes --all-extras \
		--custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

.PHONY: clean
clean: ## remove caches and builds; keeps .venv/ and .tools/ (rm -r them to set up anew)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
	find llmgw agent tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
