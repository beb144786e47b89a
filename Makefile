# make lab | make test | make site | make clean
# Each makes .venv first, when it is missing or older than pyproject.toml, and then calls `workbook`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: lab test site clean
lab: .venv/.plain
	$(BIN)/workbook lab

test: .venv/.test
	$(BIN)/workbook test

site: .venv/.site
	$(BIN)/workbook site

.venv/.plain: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/.test: .venv/.plain
	$(PIP) --editable ".[test]"
	@touch $@

.venv/.site: .venv/.plain
	$(PIP) --editable ".[site]"
	@touch $@

clean:
	rm -rf .venv _build
