# `make demo` and `make test` set up everything they need; `make help` lists the rest.

PYTHON ?= python3
DEMO_OUT ?= demo-run
PYTEST_ARGS ?= -n auto

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: $(INSTALLED) ## create .venv with all dependencies

demo: $(INSTALLED) ## fine-tuning, ConFiT and best on five tasks into demo-run/ (again: print its table)
	$(BIN)/confitune run --method finetune --method confit --method best --out $(DEMO_OUT) --resume

test: lint ## lint, types, import contracts, then all tests (PYTEST_ARGS="-k metrics" to choose)
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## let ruff format the code and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches, build outputs and the demo's results
	rm -rf $(VENV) $(DEMO_OUT) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "confitune needs Python 3.10 or newer as '$(PYTHON)'. Name another: make PYTHON=/path/to/python3 ..." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot create virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; \
		exit 1; }
	@echo "Setting up $(VENV). The first time takes a few minutes and several GB, because of PyTorch."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
