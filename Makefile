# Every target makes what it needs: a virtual environment on first use, and again only when the project's
# requirements change. `make help` lists the targets.

PYTHON ?= python3.11 python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt

PROMPT ?= two red circles and a blue square
BUDGET ?= 200
SEED ?= 0
DEMO_ARGS ?= --budget $(BUDGET) --seed $(SEED) --out imgscale-out/demo
PAGE_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
QUANTISED := $(VENV)/quantised
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable chrome

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo page test quantised lint bench browser clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

demo: $(STAMP)  ## search for a better image of PROMPT with a bundled model
	$(BIN)/imgscale generate "$(PROMPT)" $(DEMO_ARGS)

page: $(STAMP)  ## serve the demo's page on this machine (PAGE_ARGS go to imgscale demo)
	$(BIN)/imgscale demo $(PAGE_ARGS)

test: $(STAMP)  ## run the tests (PYTEST_ARGS="-m 'not slow'" for the quick ones)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

# Apart from the environment: where torchao is installed, diffusers imports it in every process, and it warns.
quantised: $(STAMP)  ## run the tests of quantised weights with torchao, which quantises on a CPU
	@test -d $(QUANTISED)/torchao || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(addprefix --constraint ,$(CONSTRAINTS)) --no-deps --target $(QUANTISED) torchao
	PYTHONPATH=$(QUANTISED) $(BIN)/python -m pytest tests/test_quantised.py

lint: $(STAMP)  ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## compare searches on a few prompts (BENCH_ARGS go to imgscale bench)
	$(BIN)/imgscale bench benchmarks/quick.yaml --out imgscale-out/bench $(BENCH_ARGS)

# The demo's tests drive one; without it they are skipped, and say so.
browser:  ## install Chromium where there is no browser (Debian, as root)
	@for name in $(BROWSERS); do command -v "$$name" >/dev/null && exit 0; done; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium

clean:  ## remove the environment, builds and caches, but no image
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# CONSTRAINTS= installs the newest releases instead of those that the tests ran with.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || { \
	  for python in $(PYTHON); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "Making $(VENV) with $$("$$python" --version)"; \
	      exec "$$python" -m venv $(VENV); \
	    fi; \
	  done; \
	  echo "imgscale needs Python 3.11 or newer with its venv module, and '$(PYTHON)' gave none:" \
	       "install it (Debian: apt-get install python3.11-venv), or name one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[dev]'
	@touch $@
