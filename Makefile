# The first use of any target makes .venv and installs the package into it; later uses find it there.

PYTHON ?= python3
DEMO_STEPS ?= 300

BIN := .venv/bin
INSTALLED := .venv/installed-by-make

.PHONY: help demo test test-slow check format clean

help:
	@echo "make demo       train on 4 local ranks, dense and Ok-Topk: table, demo/loss.png, demo/demo.json"
	@echo "make test       make check, then all tests that are not slow"
	@echo "make test-slow  the slow tests"
	@echo "make check      formatting, lint and types, without changing anything"
	@echo "make format     format and fix what can be fixed"
	@echo "make clean      remove caches and the demo's output (.venv stays; rm -r .venv removes it)"

demo: $(INSTALLED)
	@mkdir -p demo
	$(BIN)/sparsync train --algorithm dense,oktopk --ranks 4 --steps $(DEMO_STEPS) --density 0.01 \
	  --seed 0 --plot demo/loss.png --json demo/demo.json

test: check
	$(BIN)/pytest -m "not slow"

# pytest ends with 5 when no test is slow
test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow || test $$? -eq 5

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf demo build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "sparsync needs Python >= 3.10, but $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1);" \
	    "name another, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once; torch is large)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
