# Two commands do everything on a fresh machine: `make up` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 3
# SGLang, a small model and two engines on the CPU: `make up ENGINE=sglang`, `make test-real`.
ENGINE ?= emulated
VENV_SGLANG ?= .venv-sglang
SMALL_MODEL ?= .models/smollm2-135m
# Where the package index gives the CUDA build of torch: SGLANG_PIP_ARGS='--extra-index-url <an index with the CPU build>'
SGLANG_PIP_ARGS ?=
SGLANG_BIN := $(VENV_SGLANG)/bin
export TRIMTAB_SGLANG_PYTHON ?= $(abspath $(SGLANG_BIN)/python)
REAL := $(VENV_SGLANG)/.ready $(SMALL_MODEL)/model.safetensors

.PHONY: help system system-compose up test test-real test-compose lint format install sglang bench bench-virtual bench-sglang bench-sglang-traffic lock clean

help:
	@echo "make up      install if needed, run the embedded stack until Ctrl-C (ARGS='--engines 2 --load chat')"
	@echo "             with SGLang on the CPU instead of emulated engines: make up ENGINE=sglang"
	@echo "make test    install if needed, run every test that needs no SGLang (ARGS='-k router')"
	@echo "make test-real   the tests on real SGLang engines (on the CPU)"
	@echo "make test-compose   docker-compose.yml in Podman, on images made of Debian packages; as root, it installs what it needs"
	@echo "make system  Debian packages that some tests need: Prometheus with promtool, Chromium, a font"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make bench   router benchmark beside its peers (ARGS='--quick')"
	@echo "make bench-virtual   published results and production traces in virtual time (ARGS='--quick')"
	@echo "make bench-sglang   KV transfer and interference on two real engines (ARGS='--quick')"
	@echo "make bench-sglang-traffic   two real engines under traffic: the simulator's fidelity, then Trimtab beside"
	@echo "             fixed patterns and sglang-router (ARGS='--quick')"
	@echo "make sglang  install SGLang for the CPU and the small model (1.8 GB + 0.3 GB)"
	@echo "make lock    re-resolve requirements/*.lock from pyproject.toml"

ifeq ($(ENGINE),sglang)
up: $(VENV)/.base $(REAL)
	@exec $(BIN)/trimtab up --engine sglang --model $(SMALL_MODEL) $(ARGS)
else
up: $(VENV)/.base
	@exec $(BIN)/trimtab up $(ARGS)
endif

# Without these the tests that need them are skipped. Needs root where something is missing.
system:
	@command -v promtool >/dev/null && command -v chromium >/dev/null || { apt-get update -q && \
		apt-get install -y -q --no-install-recommends prometheus chromium fonts-dejavu-core; }

test: $(VENV)/.dev
	@echo "compiling the twin, unless that is done ..."
	@$(BIN)/python -c 'from controller.search_jobs import prepare; prepare()'
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not real" $(ARGS)

# One process: all of these tests share two engines, which take half the machine each.
test-real: $(VENV)/.dev $(REAL)
	TRIMTAB_SMALL_MODEL=$(SMALL_MODEL) $(BIN)/python -m pytest -m real --timeout 900 $(ARGS)

# Images and the virtual environment of podman-compose are kept there from run to run: 3 GB.
COMPOSE_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trimtab-compose

test-compose: $(VENV)/.dev system-compose $(COMPOSE_CACHE)/venv/.ready
	PATH="$(COMPOSE_CACHE)/venv/bin:$$PATH" TRIMTAB_TEST_COMPOSE=$(COMPOSE_CACHE) $(BIN)/python -m pytest tests/compose/test_demo.py $(ARGS)

system-compose:
	@command -v podman >/dev/null && command -v runc >/dev/null && command -v mmdebstrap >/dev/null || { apt-get update -q && \
		apt-get install -y -q --no-install-recommends podman runc netavark aardvark-dns iptables mmdebstrap; }

$(COMPOSE_CACHE)/venv/.ready: requirements/compose.lock
	$(PYTHON) -m venv $(COMPOSE_CACHE)/venv
	$(COMPOSE_CACHE)/venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/compose.lock
	@touch $@

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

bench-virtual: $(VENV)/.bench
	$(BIN)/python -m benchmarks paper $(ARGS)
	$(BIN)/python -m benchmarks traces $(ARGS)

bench-sglang: $(VENV)/.bench $(REAL)
	$(BIN)/python -m benchmarks sglang-transfer --model $(SMALL_MODEL) $(ARGS)
	$(BIN)/python -m benchmarks sglang-interference --model $(SMALL_MODEL) $(ARGS)

bench-sglang-traffic: $(VENV)/.bench $(REAL)
	$(BIN)/python -m benchmarks fidelity --model $(SMALL_MODEL) $(ARGS)
	$(BIN)/python -m benchmarks adapt --sglang --model $(SMALL_MODEL) $(ARGS)

install: $(VENV)/.dev

sglang: $(REAL)

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: install python3-venv (apt-get install python3-venv) and try again"; rm -rf $(VENV); exit 1; }

# A stamp per set of dependencies: installing again is needed only when a lock or pyproject changes.
$(VENV)/.base $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: requirements/%.lock pyproject.toml | $(VENV)/bin/python
	@echo "installing trimtab ($*) into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(SGLANG_BIN)/python:
	@$(PYTHON) -m venv $(VENV_SGLANG) || { echo "cannot make a virtual environment: install python3-venv (apt-get install python3-venv) and try again"; rm -rf $(VENV_SGLANG); exit 1; }

$(VENV_SGLANG)/.ready: requirements/sglang-cpu.lock pyproject.toml | $(SGLANG_BIN)/python
	@echo "installing SGLang for the CPU into $(VENV_SGLANG) (1.8 GB, takes a minute or two) ..."
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SGLANG_PIP_ARGS) -r requirements/sglang-cpu.lock
	$(SGLANG_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(SGLANG_BIN)/python -P -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' \
		|| { echo "torch is not its CPU build: say where that is with SGLANG_PIP_ARGS (see the Makefile)"; exit 1; }
	@touch $@

$(SMALL_MODEL)/model.safetensors: | $(VENV_SGLANG)/.ready
	@echo "preparing the small model in $(SMALL_MODEL) ..."
	@TQDM_DISABLE=1 $(SGLANG_BIN)/python -P -m engines.sglang.model_folder $(SMALL_MODEL)

lock: $(VENV)/.dev
	for set in base dev bench; do \
		case $$set in base) extra=;; dev) extra="--extra dev";; bench) extra="--extra dev --extra bench";; esac; \
		$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
			pyproject.toml $$extra -o requirements/$$set.lock; \
	done

clean:
	rm -rf $(VENV) $(VENV_SGLANG) $(SMALL_MODEL) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build dist
