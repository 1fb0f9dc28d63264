# Needs Python 3.11 or later and make; everything else goes into .venv.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
PACKAGE := .venv/.package
STAMP := .venv/.installed
PIP = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# What pip compiles one file after the other, on all cores, and without the tests of others.
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/tests/' .venv/lib || true

# One thread a process: the tests run in WORKERS processes, and threads on top would compete for the same cores.
export OMP_NUM_THREADS := 1
# The tests start Python many times: what one has compiled the next one reads.
unexport PYTHONDONTWRITEBYTECODE
# pyright is pinned; it need not ask the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo env lint format test docs notebooks outputs figures plan reference pictures gallery release-check clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

demo: $(PACKAGE)  ## train small networks, measure them, write tables, pictures and a page into flatness-demo
	$(BIN)/flatness demo

env: $(STAMP)  ## the development environment, in .venv

lint: $(STAMP)  ## ruff, pyright and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads $(WORKERS)
	$(BIN)/lint-imports

format: $(STAMP)  ## lay the code out as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint  ## lint, then all tests and the examples in docstrings
	$(BIN)/pytest -n $(WORKERS)

docs: $(STAMP)  ## build the documentation site into build/site, warnings being errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "To read it: $(BIN)/python -m http.server --directory build/site"

notebooks: $(STAMP)  ## run docs/notebooks and keep their output in them
	$(BIN)/python docs/make_notebooks.py

outputs: $(STAMP)  ## run the examples in README and docs, and write what they print into them
	$(BIN)/python docs/make_outputs.py

figures: $(STAMP)  ## how the code is laid out: modules, lines, importers, branching
	$(BIN)/python docs/make_figures.py

plan: $(STAMP)  ## draw the rooms of src/flatness, from their imports, into docs/pictures
	$(BIN)/python docs/make_floor_plan.py

reference: $(STAMP)  ## write docs/reference from the catalogue
	$(BIN)/python docs/make_reference.py

pictures: $(STAMP)  ## draw all pictures of README and docs; pages need Chromium and its driver
	$(BIN)/python docs/make_landscapes.py
	$(BIN)/python docs/make_stability.py
	$(BIN)/python docs/make_metrics.py
	$(BIN)/python docs/make_pictures.py

gallery: $(STAMP)  ## make figures and tables of docs/gallery from the kept records
	$(BIN)/python docs/make_gallery.py
	$(BIN)/python benchmarks/power_method.py --figure docs/gallery/rangamani2019-figure1.png

release-check: $(STAMP)  ## build wheel and sdist, install the wheel into an empty environment, run the demo there
	$(PIP) build twine
	.ci/release-check

clean:  ## remove .venv and all caches
	rm -rf .venv build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is there is brought up to date, in seconds; `make clean` starts one from nothing. The package
# itself is built with the pinned setuptools too, hence no build isolation.
define VENV
test -x $(BIN)/python || $(PYTHON) -m venv .venv
$(PIP) setuptools
endef

$(PACKAGE): pyproject.toml constraints.txt
	$(VENV)
	$(PIP) --no-build-isolation --editable .
	$(COMPILE)
	touch $@

$(STAMP): pyproject.toml constraints.txt tests/requirements.txt
	$(VENV)
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/requirements.txt
	$(COMPILE)
	touch $(PACKAGE) $@
