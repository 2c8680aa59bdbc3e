# Each target installs what it needs into VENV first: quickstart the packages of a run, the others those of development.
## PYTHON=python3.12	interpreter that the environment is made with (default: python3)
PYTHON ?= python3
## VENV=DIR	the environment's folder (default: .venv)
VENV ?= .venv
BIN := $(VENV)/bin
## INSTALL="uv pip install"	installs the packages; uv takes a fifth of pip's time and does not read pip.conf (default: the environment's pip)
INSTALL ?= $(BIN)/pip install
## SOURCE=FILE	what is installed: a wheel or an sdist instead of this clone (default: --editable .)
SOURCE ?= --editable .
## ARGS="seed=7 --quiet"	recipe settings and options that quickstart and try-dist pass to distcse.train
ARGS ?=
TORCH := $(shell grep '^torch==' constraints.txt)
TORCH_CPU := https://download.pytorch.org/whl/cpu
NVIDIA := $(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi 2>/dev/null)
## TORCH_INDEX=URL	where pip also looks for torch (default: PyTorch's CPU builds where there is no NVIDIA driver; empty: nowhere else)
TORCH_INDEX ?= $(if $(NVIDIA),,$(TORCH_CPU))

# Hundreds of processes import the same modules: without their bytecode, each compiles PyTorch, Ray and this package anew.
unexport PYTHONDONTWRITEBYTECODE

# Two processes take file after file, the longest first; the smoke tests on Ray go to the same one (tests/conftest.py).
# One that crashes fails the suite: pytest-xdist's replacement would wait for tests that never come, and the suite for it.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --max-worker-restart 0 --no-loadscope-reorder
UNIT := tests/unit tests/oracle benchmarks/tests

# PyTorch's kernels as on a CPU without AVX-512, and the tests of what is chosen or computed otherwise there.
OLDER_CPU := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
ON_OLDER_CPU := $(addprefix tests/unit/test_,models_fast.py precision.py teacher_kinds.py encoder.py head.py student.py)

OLDEST_PYTHON := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)

# The oldest Ray that pyproject.toml admits, in a folder that Python reads before the environment's own packages.
OLDEST_RAY := $(shell sed -n 's/.*"ray\[.*>=\([0-9.]*\),.*/\1/p' pyproject.toml).0
# Of its tests, `make test-slow` runs those that `make test-oldest-ray` leaves: the latter has a sweep whose trial has two workers.
ON_OLDEST_RAY := tests/unit/test_ray_versions.py $(addprefix tests/cluster/,test_on_ray.py test_sweep.py)
WITH_OLDEST_RAY = PYTHONPATH=$(CURDIR)/build/ray-$(OLDEST_RAY) $(BIN)/python -m pytest
FIRST_ON_OLDEST_RAY := tests/unit/test_ray_versions.py tests/cluster/test_sweep.py::test_tpe_with_a_trainer_of_two_workers_in_its_trial

.PHONY: help quickstart dist try-dist test test-faults test-oldest-ray test-slow unit lint prose types bench lock release-notes clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'
	@echo && sed -n 's/^## / /p' $(MAKEFILE_LIST)

# pip prefers torch 2.13.0+cpu of the second index to PyPI's 2.13.0, whose CUDA libraries are 2.5 GB more to download. Torch alone:
# what it needs comes with the next line, from pip's own index. An index that cannot be reached is left out after 9 s of retries.
# The extra dev contains the extra quickstart: installing it makes both stamps. Python compiles the modules that are imported.
$(VENV)/.%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --no-deps $(addprefix --extra-index-url ,$(TORCH_INDEX)) $(TORCH)
	VIRTUAL_ENV=$(VENV) $(INSTALL) --quiet --no-compile --constraint constraints.txt $(SOURCE)'[$*]'
	touch $@ $(if $(filter dev,$*),$(VENV)/.quickstart)

quickstart: $(VENV)/.quickstart ## set up, then distil a three-layer student from all-MiniLM-L6-v2 on this machine
	$(BIN)/python -m distcse.train quickstart $(ARGS)

test: $(VENV)/.dev ## set up, then run the unit tests, the oracle tests, and small runs on a local Ray cluster
	$(PYTEST) tests/cluster $(UNIT) -m "not slow"

test-faults: $(VENV)/.dev ## set up, then disturb runs: killed processes, load, failing storage, hostile files
	$(PYTEST) tests/faults -m "not slow"

test-oldest-ray: $(VENV)/.dev build/ray-$(OLDEST_RAY)/.installed ## set up, then run a sweep with the oldest supported version of Ray
	$(WITH_OLDEST_RAY) $(FIRST_ON_OLDEST_RAY)

test-slow: $(VENV)/.dev $(VENV)/.docs build/ray-$(OLDEST_RAY)/.installed ## set up, then run all other tests, for a night or a release; also as on an older CPU
	$(PYTEST) tests/cluster tests/faults $(UNIT) -m slow
	$(OLDER_CPU) $(PYTEST) $(ON_OLDER_CPU)
	$(WITH_OLDEST_RAY) $(ON_OLDEST_RAY) -m "oldest_ray or not cluster" $(addprefix --deselect ,$(FIRST_ON_OLDEST_RAY))

build/ray-%/.installed: $(VENV)/.dev
	rm -rf $(@D)
	$(BIN)/pip install --quiet --no-deps --target $(@D) ray==$*
	touch $@

unit: $(VENV)/.dev ## set up, then run the tests that need no Ray cluster and are not marked slow
	$(PYTEST) $(UNIT) -m "not slow"

lint: $(VENV)/.dev ## set up, then ruff and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose.py

prose: $(VENV)/.dev ## set up, then list words that nobody in the field uses (.ci/prose.toml)
	$(BIN)/python .ci/prose.py

types: $(VENV)/.dev ## set up, then mypy
	$(BIN)/mypy

bench: $(VENV)/.dev ## set up, then measure all CPU rows of benchmarks/README.md and print what moved (DISTCSE_DATA=FOLDER)
	$(BIN)/python -m benchmarks.bench

dist: ## build a wheel and an sdist, dist/ (URL=https://HOST/OWNER/distcse: with the links of a package page)
	$(PYTHON) .ci/package.py $(URL)
	$(PYTHON) -m venv build/build
	build/build/bin/pip install --quiet build
	rm -rf dist
	build/build/bin/python -m build --outdir dist build/package

# Outside the clone, whose folder `distcse` Python would import.
try-dist: ## install the wheel of dist/ into a bare environment, and run the quickstart there (SOURCE=dist/FILE.tar.gz: the sdist)
	rm -rf build/try
	$(MAKE) build/try/.quickstart VENV=build/try SOURCE="$(if $(filter file,$(origin SOURCE)),$$(ls dist/*.whl),$(SOURCE))"
	cd build/try && bin/distcse recipe ls && bin/python -m distcse.train quickstart $(ARGS)

release-notes: ## print what CHANGELOG.md says of a version (VERSION=0.2.0, or unreleased)
	@$(PYTHON) release_notes.py '$(VERSION)'

# --python-version: uv refuses a pin that needs a newer Python than the oldest that pyproject.toml admits.
# Of torch the CPU build alone: those of CUDA bring libraries of their own, another set for every build.
lock: ## write requirements.lock anew: the versions of constraints.txt with the hashes of their files
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile constraints.txt --python-version $(OLDEST_PYTHON) --no-deps --no-emit-package torch \
		--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file requirements.lock
	build/lock/bin/pip download --quiet --no-deps --extra-index-url $(TORCH_CPU) --dest build/torch $(TORCH)
	{ echo '$(TORCH) \'; build/lock/bin/pip hash build/torch/torch-*+cpu-*.whl | sed -n 's/^--hash/    --hash/p'; } >> requirements.lock

clean: ## remove the environment
	rm -rf $(VENV)
