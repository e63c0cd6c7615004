# `make run` trains the default job, `make test` runs all checks; both set up what they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# How many tests run side by side; most of them wait for something.
JOBS ?= 4

# With an engine, torch lives in the image; without one, local processes need it here.
NEEDS = $(shell docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && echo base || echo torch)

.PHONY: run test
run: $(VENV)/.$(NEEDS)
	@$(VENV)/bin/python -m orchestrate run $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

$(VENV)/.base $(VENV)/.torch $(VENV)/.test: $(VENV)/.%: pyproject.toml
	@echo 'setting up $(VENV) for "$*", once' >&2
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --quiet --disable-pip-version-check --editable '.$(patsubst %,[%],$(filter-out base,$*))'
	@touch $@ $(VENV)/.base $(if $(filter test,$*),$(VENV)/.torch)
