# Everything runs in a virtual environment of its own, .venv, which each target fills with what it needs.
# An edit of the C++, of pyproject.toml or of the pins installs anew; Python files are used where they lie.
# `make demo PYTHON=python3.12` picks another interpreter; `rm -r .venv` starts over.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
JOBS ?= 2

# A target that was to build the extension must not quietly go on without it. COWALK_REQUIRE_NATIVE=0 lets it.
export COWALK_REQUIRE_NATIVE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_REQUIRE_VIRTUALENV = 1

BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.cpp native/*.hpp)
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format types imports docs bench bench-quick asan asan-short triton clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/has-demo ## Train a small net on handwritten digits and print its table
	$(BIN)/cowalk demo

test: $(VENV)/has-test ## All tests
	$(PYTEST) -n $(JOBS) --dist=worksteal

lint: $(VENV)/has-dev ## Style: ruff's rules and its formatter
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/has-dev ## Mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/has-dev ## Types: pyright, strict on the package
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(VENV)/has-dev ## Imports point one way
	$(BIN)/lint-imports

docs: $(VENV)/has-dev ## The examples in README.md, docs/ and the docstrings do what they say
	$(PYTEST) --doctest-glob='*.md' --doctest-modules README.md $(wildcard docs) src/cowalk \
		--ignore=src/cowalk/measure/triton_kernel.py

bench: $(VENV)/has-dev ## Speed beside its peers
	$(BIN)/python -m benchmarks walk --json
	$(BIN)/python -m benchmarks measure --json
	$(BIN)/python -m benchmarks accumulate --json
	$(BIN)/python -m benchmarks update --json

bench-quick: $(VENV)/has-dev ## The same, short: that it runs, not how fast
	$(BIN)/python -m benchmarks walk --quick --json
	$(BIN)/python -m benchmarks measure --quick --json
	$(BIN)/python -m benchmarks accumulate --quick --json
	$(BIN)/python -m benchmarks update --quick --json

# The sanitizers ------------------------------------------------------------------------------------------------------
# A second environment holds an instrumented build; it sees the packages of the first one behind its own. The leak
# detector stays off (CPython keeps objects to its end; the tests count references instead). libstdc++ is loaded early
# too, or the sanitizer does not find what throws in it; PYTHONMALLOC=malloc shows it every object.

ASAN := build/asan
ASAN_ENV = env ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONMALLOC=malloc \
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)"
ASAN_PYTEST = $(ASAN_ENV) $(ASAN)/bin/python -m pytest -p no:cacheprovider tests/tree tests/measure/test_native_memory.py

asan: $(ASAN)/built ## The extension's tests under AddressSanitizer and UBSan
	$(ASAN_PYTEST)

asan-short: $(ASAN)/built ## The same without the generated trees
	$(ASAN_PYTEST) -m "not hypothesis and not gpu"

$(ASAN)/built: $(VENV)/has-test $(BUILT_FROM) $(shell find src -name '*.py' 2>/dev/null)
	rm -rf $(ASAN)
	$(BIN)/python -m venv $(ASAN)
	$(ASAN)/bin/python -m pip install --quiet --no-deps --config-settings=cmake.define.COWALK_SANITIZE=address,undefined .
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(ASAN)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth
	touch $@

# The Triton kernel in Triton's interpreter ---------------------------------------------------------------------------
# Triton stands in an environment of its own, which sees the packages of the first one behind it: beside the CPU build of
# torch it would only change how torch compiles.

TRITON := build/triton

triton: $(TRITON)/made ## The Triton kernel's tests, in Triton's interpreter
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest -p no:cacheprovider tests/measure/test_triton.py

$(TRITON)/made: $(VENV)/has-test
	rm -rf $(TRITON)
	$(BIN)/python -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet -c constraints.txt triton
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(TRITON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth
	touch $@

# The environment -----------------------------------------------------------------------------------------------------

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cowalk needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/has-demo: $(VENV)/made $(BUILT_FROM)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/has-test: $(VENV)/made $(BUILT_FROM)
	$(INSTALL) -e '.[demo,test]'
	touch $(VENV)/has-demo $@

$(VENV)/has-dev: $(VENV)/made $(BUILT_FROM)
	$(INSTALL) -e '.[demo,test,docs,lint,bench]'
	touch $(VENV)/has-demo $(VENV)/has-test $@

clean: ## Remove what was built and installed
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
