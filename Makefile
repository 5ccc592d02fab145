# make demo      a real document through the whole path, in about two minutes on two cores
# make test      lint, types, import contract, all tests on both ends of the supported transformers
# make test-fast only the quick tests
# make clean     remove environments and caches

PYTHON ?= python3
VENV ?= .venv
COMPAT ?= .compat
OLDEST_TRANSFORMERS = 5.16.1
WORKERS ?= 2
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# one thread a worker: two workers on two cores would otherwise fight over them
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: demo test test-fast lint unit oldest clean

demo: $(VENV)/.runtime
	$(BIN)/statebridge demo --out demo_output

test: lint unit oldest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.test
	$(PYTEST) --cov --cov-report=term:skip-covered

# the oldest supported transformers, laid over the same environment
oldest: $(VENV)/.test $(COMPAT)/.installed
	PYTHONPATH=$(COMPAT) $(PYTEST) tests/state tests/capture tests/bridge

test-fast: $(VENV)/.test
	$(PYTEST) -m "not slow"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(PIP) -c constraints.txt -e ".[test,lint]"
	touch $@

# huggingface_hub 2 came after this transformers, so the overlay brings its own
$(COMPAT)/.installed: $(BIN)/python Makefile
	rm -rf $(COMPAT)
	$(PIP) --target $(COMPAT) "transformers==$(OLDEST_TRANSFORMERS)" "huggingface_hub<2"
	touch $@

clean:
	rm -rf $(VENV) $(COMPAT) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_output
