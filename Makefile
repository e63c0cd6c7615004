# `make run` trains the default job, `make test` runs all checks; both set up what they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# How many tests run side by side; most of them wait for something.
JOBS ?= 4

# With an engine, torch lives in the image; without one, local processes need it here.
NEEDS = $(shell docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && echo base || echo torch)

.PHONY: run test test-gpu lock
run: $(VENV)/.$(NEEDS)
	@$(VENV)/bin/python -m orchestrate run $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

# The tests on GPUs, with what $(PYTHON) has: torch, pytest and pyyaml. Warnings of other versions do not fail them.
test-gpu:
	$(PYTHON) -m pytest -o addopts=-ra -W default -m gpu $(ARGS) tests/test_gpu_*.py

# What the image installs: the newest versions that pyproject.toml allows, with their hashes, for Python 3.11 and later.
lock: $(VENV)/.base
	$(VENV)/bin/pip install --quiet --disable-pip-version-check uv
	@sed -n 's/^torch = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",' | tr ' ' '\n' | \
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --no-config \
		--no-emit-index-url --custom-compile-command 'make lock' --output-file requirements.lock -

$(VENV)/.base $(VENV)/.torch $(VENV)/.test: $(VENV)/.%: pyproject.toml
	@echo 'installing the packages that "make $(if $(filter test,$*),test,run)" needs in $(VENV)$(if $(filter base,$*),,: torch is some GB)' >&2
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install $(if $(filter base,$*),--quiet --quiet) --disable-pip-version-check --editable '.$(patsubst %,[%],$(filter-out base,$*))'
	@touch $@ $(VENV)/.base $(if $(filter test,$*),$(VENV)/.torch)
