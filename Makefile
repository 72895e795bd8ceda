# `make demo` and `make test` do all set-up themselves, once, and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
READY := $(VENV)/.ready

# the engine and its rules, without what takes long
CORE := tests/rules $(filter-out %op_database.py %distributed.py %documents.py %torch_nn.py %transformers.py,$(wildcard tests/test_*.py))
# what shortcuts could change
PLAIN := tests/rules/test_rules.py $(addprefix tests/test_,$(addsuffix .py,backward walk attach golden theorems training)) tests/optim/test_template.py

.PHONY: help demo test check lint format clean

help:
	@echo "make demo    train on digits, measure estimators against the exact Hessian diagonal, and report both as a page"
	@echo "make test    formatting, lint, types and tests"
	@echo "make check   the same without the tests that take long: a minute, for those who work on it"
	@echo "make format  rewrite the sources in the house format"
	@echo "make clean   remove the virtual environment and all caches"

demo: $(READY)
	for name in SGD Adam AdaHessian AdaHesScaleGN AdaHesScale; do \
	  $(BIN)/hesscale train digits --optimizer $$name --seeds 3 --out runs/demo/train || exit 1; \
	done
	$(BIN)/hesscale quality --quick --out runs/demo/quality
	$(BIN)/hesscale report runs/demo --out runs/demo/report

test: lint
	$(BIN)/pytest -n 2
	HESSCALE_PLAIN=1 $(BIN)/pytest -n 2 -q $(PLAIN)

check: lint
	$(BIN)/pytest -n 2 -q $(CORE)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

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
