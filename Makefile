# `make run` trains the default job, `make test` runs all checks; both create $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Number of tests to run in parallel; most of their time is waiting.
JOBS ?= 4

# With an engine, torch is in the image; without one, local processes need it here.
NEEDS = $(shell docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && echo base || echo torch)

.PHONY: run test test-gpu lock
run: $(VENV)/.$(NEEDS)
	@$(VENV)/bin/python -m orchestrate run $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --config-file tests/mypy.ini tests
	$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

# The GPU tests, with torch, pytest and pyyaml of $(PYTHON). Warnings of other versions do not fail them.
test-gpu:
	$(PYTHON) -m pytest -o addopts=-ra -W default -m gpu $(ARGS) tests/gpu

# The packages of the image: the newest versions that pyproject.toml allows, with hashes, for Python 3.11 and later.
lock: $(VENV)/.base
	$(VENV)/bin/pip install --quiet --disable-pip-version-check uv
	@sed -n 's/^torch = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",' | tr ' ' '\n' | \
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --no-config \
		--no-emit-index-url --custom-compile-command 'make lock' --output-file requirements.lock -

$(VENV)/.base $(VENV)/.torch $(VENV)/.test: $(VENV)/.%: pyproject.toml
	@echo 'installing the packages for "make $(if $(filter test,$*),test,run)" in $(VENV)$(if $(filter base,$*),, (torch: several GB))' >&2
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install $(if $(filter base,$*),--quiet --quiet) --disable-pip-version-check --editable '.$(patsubst %,[%],$(filter-out base,$*))'
	@touch $@ $(VENV)/.base $(if $(filter test,$*),$(VENV)/.torch)
