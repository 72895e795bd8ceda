# `make demo` and `make test` do all set-up themselves, once, and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
READY := $(VENV)/.ready

.PHONY: help demo test format clean

help:
	@echo "make demo    measure all estimators against the exact Hessian diagonal: tables and figures"
	@echo "make test    formatting, lint, types and tests"
	@echo "make format  rewrite the sources in the house format"
	@echo "make clean   remove the virtual environment and all caches"

demo: $(READY)
	$(BIN)/hesscale quality --quick

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# the build backend is installed by hand, so that it is pinned as well
$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (some minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
