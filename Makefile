# `make run` trains the default job, `make test` runs the tests; both create $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SITE ?= site
# Number of tests to run in parallel; most of their time is waiting.
JOBS ?= 4
PYTEST = $(VENV)/bin/python -m pytest -n $(JOBS) --durations=10

# With an engine, torch is in the image; without one, local processes need it here.
NEEDS = $(shell docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && echo base || echo torch)

.PHONY: run lint check test test-all test-gpu docs lock release
run: $(VENV)/.$(NEEDS)
	@$(VENV)/bin/python -m orchestrate run $(ARGS)

# Collecting the tests here compiles them once, and not in each process that runs them.
lint: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --config-file tests/mypy.ini tests & types=$$!; \
	$(VENV)/bin/python -m pytest --collect-only -qq > /dev/null & \
	$(VENV)/bin/mypy; code=$$?; wait $$types || code=$$?; wait; exit $$code

# Lint, types, and the tests that start no node and no engine: in minutes, before each commit.
check: JOBS = 6
check: lint
	$(PYTEST) $(ARGS) tests/unit tests/app tests/project

# The same, and the end-to-end tests, on the engine if there is one.
test: lint
	$(PYTEST) $(ARGS)

# Everything: both engines, all frameworks, rare failures, benchmarks, generated input with random seeds.
test-all: lint
	$(PYTEST) --all $(ARGS)

# The GPU tests, with torch, pytest and the packages of this project in $(PYTHON). Warnings of other versions do not fail them.
test-gpu:
	$(PYTHON) -m pytest -o addopts=-ra -W default -m gpu $(ARGS) tests/gpu

# The documentation as a site, in $(SITE), which needs no server: open $(SITE)/index.html.
docs: $(VENV)/.test
	@$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs . $(SITE)
	@echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > $(SITE)/index.html

# Wheel and source distribution in dist/, checked, installed in a fresh environment and run; uploads nothing.
release: $(VENV)/.test
	PYTHON=$(PYTHON) .ci/release $(VENV)/bin/python

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
