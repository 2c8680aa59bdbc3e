# Everything a fresh machine needs is done by the target you ask for: environment, installation, run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Torch first and alone: asked for by another package, pip would take the newest build and its CUDA libraries.
TORCH := $(shell grep '^torch==' constraints.txt)
TORCH_CPU := https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.installed

.PHONY: help quickstart test unit lint types bench lock release-notes clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(STAMP) ## set up, then distil a three-layer student from all-MiniLM-L6-v2 on this machine
	$(BIN)/python -m distcse.train quickstart

test: $(STAMP) ## set up, then run every test
	$(BIN)/python -m pytest tests/unit tests/oracle --numprocesses 2
	$(BIN)/python -m pytest tests/cluster

unit: $(STAMP) ## set up, then run the tests that need neither a cluster nor patience
	$(BIN)/python -m pytest tests/unit tests/oracle -m "not slow" --numprocesses 2

lint: $(STAMP) ## set up, then ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## set up, then mypy
	$(BIN)/mypy

bench: $(STAMP) ## set up, then measure all CPU rows of benchmarks/README.md and print what moved (DISTCSE_DATA=FOLDER)
	$(BIN)/python -m benchmarks.bench

release-notes: ## print what CHANGELOG.md says of a version (VERSION=0.2.0, or unreleased)
	@$(PYTHON) release_notes.py '$(VERSION)'

# Of torch the CPU build alone: those of CUDA bring libraries of their own, another set for every build.
lock: ## write requirements.lock anew: the versions of constraints.txt with the hashes of their files
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile constraints.txt --no-deps --no-emit-package torch --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file requirements.lock
	build/lock/bin/pip download --quiet --no-deps --extra-index-url $(TORCH_CPU) --dest build/torch $(TORCH)
	{ echo '$(TORCH) \'; build/lock/bin/pip hash build/torch/torch-*+cpu-*.whl | sed -n 's/^--hash/    --hash/p'; } >> requirements.lock

clean: ## remove the environment
	rm -rf $(VENV)
