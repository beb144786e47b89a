# make lab | make test | make site | make pdf | make clean | make lock
# The first four make .venv first, when it is missing or older than pyproject.toml or requirements.lock, and then call `workbook`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install $(PIP_FLAGS) --progress-bar off --disable-pip-version-check --constraint requirements.lock
STEP := $(PYTHON) -I lib/workbook/tools/step.py

.PHONY: lab test site pdf clean lock
lab: .venv/.plain
	$(BIN)/workbook lab

test: .venv/.test
	$(BIN)/workbook test

site: .venv/.site
	$(BIN)/workbook site

pdf: .venv/.site
	$(BIN)/workbook pdf

.venv/.plain: pyproject.toml requirements.lock
	@$(STEP) "Making .venv, a folder for the book's packages" $(PYTHON) -m venv .venv
	@$(STEP) "Installing what the chapters use: PyTorch, JupyterLab, MPI and their packages" $(PIP) --editable .
	@touch $@

.venv/.test: .venv/.plain
	@$(STEP) "Installing what the tests compare with: transformers, JAX and others" $(PIP) --editable ".[test]"
	@touch $@

.venv/.site: .venv/.plain
	@$(STEP) "Installing what builds the site: Sphinx and others" $(PIP) --editable ".[site]"
	@touch $@

clean:
	rm -rf .venv _build

# The newest versions that pyproject.toml allows, resolved once for every system and every Python; UPGRADE= keeps those that
# are locked, after a change of pyproject.toml. Torch and what belongs to its build are left out: see the file's head.
UPGRADE ?= --upgrade
lock:
	$(PYTHON) -m venv _build/uv
	_build/uv/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9,<1"
	cp requirements.lock _build/requirements.txt
	_build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --all-extras $(UPGRADE) \
		--no-header --no-annotate --output-file _build/requirements.txt pyproject.toml
	sed -n '/^#/p' requirements.lock >_build/lock
	grep -vE '^((torch|triton|setuptools)=|(nvidia|cuda)-)' _build/requirements.txt >>_build/lock
	mv _build/lock requirements.lock
