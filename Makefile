# make serve   set everything up and serve the demo model
# make test    set everything up and run the tests
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: serve test setup lint format
setup: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja torch
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

serve: setup
	$(VENV)/bin/ktserve serve

test: setup
	$(PY) -m pytest tests

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
