# Two commands do everything on a fresh machine: `make up` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 3

.PHONY: help up test lint format install bench lock clean

help:
	@echo "make up      install if needed, run the embedded stack until Ctrl-C (ARGS='--engines 2 --load chat')"
	@echo "make test    install if needed, run every test (ARGS='-k router')"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make bench   router benchmark beside its peers (ARGS='--quick')"
	@echo "make lock    re-resolve requirements/*.lock from pyproject.toml"

up: $(VENV)/.base
	@exec $(BIN)/trimtab up $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks router $(ARGS)

install: $(VENV)/.dev

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: install python3-venv (apt-get install python3-venv) and try again"; rm -rf $(VENV); exit 1; }

# A stamp per set of dependencies: installing again is needed only when a lock or pyproject changes.
$(VENV)/.base $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: requirements/%.lock pyproject.toml | $(VENV)/bin/python
	@echo "installing trimtab ($*) into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

lock: $(VENV)/.dev
	for set in base dev bench; do \
		case $$set in base) extra=;; dev) extra="--extra dev";; bench) extra="--extra dev --extra bench";; esac; \
		$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
			pyproject.toml $$extra -o requirements/$$set.lock; \
	done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build dist
