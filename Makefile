# `make demo` and `make test` set up everything they need; `make help` lists the rest.

PYTHON ?= python3
DEMO_OUT ?= demo-run
# Whole files go to a worker, as their tests share runs that take half a minute.
PYTEST_ARGS ?= -n auto --dist loadfile --no-loadscope-reorder
VENV ?= .venv
# Versions that are installed: the lock; constraints-oldest.txt for the oldest; empty for the newest.
CONSTRAINTS ?= constraints.txt

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH_DOCS := $(VENV)/.installed-docs
INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest pytest lint format docs wheel lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(INSTALLED) ## create .venv with all dependencies, in the versions of constraints.txt

demo: $(INSTALLED) ## fine-tuning, ConFiT and best on five tasks into demo-run/ (again: print its table)
	$(BIN)/confitune run --method finetune --method confit --method best --out $(DEMO_OUT) --resume

test: lint pytest ## lint, types, import contracts, then all tests (PYTEST_ARGS="-k metrics" to choose)

test-oldest: ## all tests with the oldest supported versions, in .venv-oldest
	$(MAKE) pytest VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

pytest: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## let ruff format the code and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(WITH_DOCS) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(INSTALLED) ## build the wheel and try it in an environment without the extras
	$(BIN)/python tools/check_wheel.py $(if $(CONSTRAINTS),--constraints $(CONSTRAINTS))

lock: $(WITH_DOCS) ## write the versions that are installed in .venv to constraints.txt
	$(BIN)/python tools/lock.py > constraints.new
	mv constraints.new constraints.txt

clean: ## remove environments, caches, build outputs and the demo's results
	rm -rf $(VENV) .venv-oldest $(DEMO_OUT) build dist site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "confitune needs Python 3.10 or newer as '$(PYTHON)'. Name another: make PYTHON=/path/to/python3 ..." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot create virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; \
		exit 1; }
	@echo "Setting up $(VENV). The first time takes a few minutes and about 7 GB, because of PyTorch."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[dev]'
	@touch $@

$(WITH_DOCS): $(INSTALLED)
	@$(INSTALL) -e '.[docs]'
	@touch $@
