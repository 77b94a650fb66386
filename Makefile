# `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

.PHONY: help
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make this checkout ready: Debian packages, .tools/, .venv/, the tiny model
	scripts/setup

.PHONY: lock
lock: ## resolve requirements.lock anew from pyproject.toml (UV=… where uv is not on PATH)
	$(or $(UV),uv) pip compile --quiet --universal --python-version 3.11 --generate-hashes --all-extras \
		--custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
