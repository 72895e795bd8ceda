# Every target does its own set-up, once, and again when the dependencies change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# both ends of the range of torch that pyproject.toml promises; constraints.txt has the one that development uses
OLDEST := 2.10.0
NEWEST := 2.15.0

# the engine and its rules, without what takes long
CORE := tests/rules $(filter-out %op_database.py %distributed.py %documents.py %torch_nn.py %transformers.py,$(wildcard tests/test_*.py))
# what shortcuts could change
PLAIN := tests/rules/test_rules.py $(addprefix tests/test_,$(addsuffix .py,backward walk attach golden theorems training)) tests/optim/test_template.py

.PHONY: help demo test test-oldest test-newest check lint format docs dist clean

help:
	@echo "make demo         train on digits, measure estimators against the exact Hessian diagonal, and report both as a page"
	@echo "make test         formatting, lint, types and tests"
	@echo "make test-oldest  the tests with the oldest torch that is supported, $(OLDEST)"
	@echo "make test-newest  the tests with the newest, $(NEWEST)"
	@echo "make check        as test, without what takes long: a minute, for those who work on it"
	@echo "make format       rewrite the sources in the house format"
	@echo "make docs         the site, in build/site, with a report of all runs in results"
	@echo "make dist         the packages of a release, in dist"
	@echo "make clean        remove the virtual environments, what was built, and all caches"

demo: $(READY)
	for name in SGD Adam AdaHessian AdaHesScaleGN AdaHesScale; do \
	  $(BIN)/hesscale train digits --optimizer $$name --seeds 3 --out runs/demo/train || exit 1; \
	done
	$(BIN)/hesscale quality --quick --out runs/demo/quality
	$(BIN)/hesscale report runs/demo --out runs/demo/report

test: lint
	$(BIN)/pytest -n 2 --dist worksteal
	HESSCALE_PLAIN=1 $(BIN)/pytest -n 2 -q $(PLAIN)

test-oldest test-newest: test-%: .venv-%/.ready
	.venv-$*/bin/pytest -n 2 --dist worksteal

check: lint
	$(BIN)/pytest -n 2 -q $(CORE)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv-docs/.ready
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --jobs auto docs build/site
	.venv-docs/bin/hesscale report results --out build/site/report > build/report.log

dist: .venv-dist/.ready
	rm -rf dist
	.venv-dist/bin/python -m build --no-isolation
	.venv-dist/bin/twine check --strict dist/*

clean:
	rm -rf .venv .venv-* build dist docs/gallery .mypy_cache .pytest_cache .ruff_cache .hypothesis

# an environment by name: which of the package's extras it has, and which torch
%/.ready: EXTRA = dev
%/.ready: TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)
.venv-oldest/.ready: TORCH = $(OLDEST)
.venv-newest/.ready: TORCH = $(NEWEST)
.venv-docs/.ready: EXTRA = docs
PIP = $*/bin/python -m pip --disable-pip-version-check install --quiet --constraint $*/constraints.txt

# the build backend is installed by hand, so that it is pinned as well
%/.ready: pyproject.toml constraints.txt
	@echo "Installing into $* (some minutes the first time) ..."
	$(PYTHON) -m venv $*
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $*/constraints.txt
	$(PIP) hatchling hatch-fancy-pypi-readme editables
	$(PIP) --no-build-isolation --editable '.[$(EXTRA)]'
	@touch $@

.venv-dist/.ready: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt build hatchling hatch-fancy-pypi-readme twine
	@touch $@
