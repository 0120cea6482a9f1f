# make demo    the main job in miniature, minutes on two CPU cores
# make test    all tests
# make lint    style and types, as CI checks them
# make bench   the measurements behind docs/performance.md
# make docs    regenerate the reference pages that come from the source
#
# Each sets up .venv as far as it needs it. On Linux without a GPU, a smaller PyTorch can be had with
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test lint bench docs clean

demo: $(VENV)/runtime
	$(BIN)/threepo demo

test: $(VENV)/dev
	$(BIN)/python -m pytest

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/step.py

docs: $(VENV)/dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/runtime: pyproject.toml constraints.txt hatch_build.py src/threepo/posterior/native.c | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt hatch_build.py src/threepo/posterior/native.c | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	touch $@
