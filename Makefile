# Every entry point of the project; CI calls the same words. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
FRAMEWORKS_STAMP := $(VENV)/.installed-frameworks
RELEASE_STAMP := $(VENV)/.installed-release
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-examples test-sweep test-all test-trainers test-hosts test-numa fuzz test-soak soak soak-losses system-packages bench figures generated check release-check format install clean

help: ## list the targets
	@echo "poprun-py: targets"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: $(STAMP) ## install what is missing and run the main job: 2 instances, 8 replicas, real digits
	$(BIN)/poprun-py --num-instances 2 --num-replicas 8 --print-topology yes examples/train.py

# Bytecode is kept: without it each worker and each process of a job would compile the tests' modules.
unexport PYTHONDONTWRITEBYTECODE

# make test TESTS=tests/poprun_py/options runs one folder, in one process: workers take longer to start.
TESTS ?= tests
# Two workers more than cores (measured on two), since many tests wait for processes. The tests of a
# module stay in one worker: they share the jobs that they look at.
WORKERS ?= $(if $(filter tests,$(TESTS)),4,0)
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=15
# These have targets of their own.
ELSEWHERE := $(foreach folder,lab numa repository,$(if $(filter tests/$(folder)%,$(TESTS)),,--ignore=tests/$(folder)))
NOT_DEFAULT := soak or sweep or long or examples or trainers

test: $(DEV_STAMP) ## run the default tests (at most 180 s on 2 cores; TESTS=tests/poprun_py/options: one folder)
	@began=$$(date +%s); $(PYTEST) $(TESTS) $(ELSEWHERE) -m "not ($(NOT_DEFAULT))" $(ARGS); code=$$?; \
	  echo "make test took $$(($$(date +%s) - began)) s (limit for all default tests on two cores: 180 s)"; exit $$code

# Only their files are read: each worker would import all others, too, only to leave their tests out.
EXAMPLES = $(sort $(shell grep -rlF --include='*.py' pytest.mark.examples $(TESTS)))

test-examples: $(FRAMEWORKS_STAMP) ## run more of the examples, and the commands of every page
	$(PYTEST) $(or $(EXAMPLES),$(TESTS)) -m "examples and not soak and not long" $(ARGS)

test-sweep: $(FRAMEWORKS_STAMP) ## run more combinations of what the default tests show, and new property examples
	$(PYTEST) $(TESTS) $(ELSEWHERE) -m "(sweep or hypothesis) and not (soak or long or examples or trainers)" --hypothesis-profile=sweep $(ARGS)

test-all: $(FRAMEWORKS_STAMP) ## run the default tests, examples, sweeps, trainers and their long versions
	$(PYTEST) $(TESTS) --ignore=tests/lab --ignore=tests/numa -m "not soak" --hypothesis-profile=sweep $(ARGS)

# Frameworks and torch's own tests take minutes: CI runs them where .ci/trainers says so.
test-trainers: $(FRAMEWORKS_STAMP) ## run PyTorch's own tests and trainers (after changes of torch_backend or collectives)
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --durations=10 tests/frameworks tests/pytorch -m "trainers and not long" $(ARGS)
	@[ -n "$(ARGS)" ] || .ci/trainers passed

# Tests of a file share hosts, so that one worker runs all of them.
test-hosts: $(DEV_STAMP) ## run the tests on several hosts made for the occasion (root, network namespaces)
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --durations=10 tests/lab -m "not long" $(ARGS)

test-numa: $(DEV_STAMP) ## run the tests on an emulated machine with several NUMA nodes (qemu)
	$(BIN)/python -m pytest -q tests/numa -m "not long" $(ARGS)

fuzz: $(DEV_STAMP) ## look for bytes that readers trip over, guided by coverage (ARGS="--seconds 60 TARGET")
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --config-settings editable_mode=compat -e '.[fuzz]' || true
	$(BIN)/python tests/fuzz/coverage_guided.py $(ARGS)

test-soak: $(DEV_STAMP) ## run the tests that take an hour: a training of 200,000 steps, and more
	$(BIN)/python -m pytest -q tests -m soak $(ARGS)

# A record that was cut off goes on; more cases of a seed begin with the same ones.
N ?= 100
SEED ?= 1
JOBS ?= 3
RECORD ?= build/soak-$(SEED).jsonl
soak: $(DEV_STAMP) ## do N=100 random faults to trainings, and resume these (root, for all kinds)
	$(BIN)/python -m tools.soak --cases $(N) --seed $(SEED) --jobs $(JOBS) --json $(RECORD) $(ARGS)

soak-losses: $(DEV_STAMP) ## train for MINUTES=20 with a loss every ten seconds, on hosts made for it (root)
	$(BIN)/python -m tools.soak.repeated_losses --minutes $(or $(MINUTES),20) --seed $(SEED) \
	  --json build/losses-$(SEED).jsonl $(ARGS)

system-packages: ## install the Debian packages that test-hosts, test-numa and tests of pages need (root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  openssh-server iproute2 rsync slurm-wlm munge qemu-system-x86 busybox-static cpio chromium mandoc

bench: $(DEV_STAMP) ## measure everything for some fifty minutes, into benchmarks/results.json (root, for hosts)
	$(BIN)/python benchmarks/collect.py $(ARGS)

figures: $(FRAMEWORKS_STAMP) ## draw the figures of the tutorials in docs/figures
	$(BIN)/python -m tools.pages.figures $(ARGS)

generated: $(DEV_STAMP) ## write the pages, pictures and modules that the code alone makes (ARGS=placement: one)
	$(BIN)/python -m tools.pages.generated $(ARGS)

docs: $(DEV_STAMP) ## build the pages as a site in build/site; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/site
	@echo "build/site/index.html"

check: $(DEV_STAMP) ## format, lint, types, import rules, tests of the repository; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p poprun_py -p popdist_py
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -p no:xdist tests/repository -m "not examples and not sweep and not long and not soak"

release-check: $(RELEASE_STAMP) ## build, look into, install and try what a release has (ARGS=--quick: one Python)
	$(BIN)/python -m tools.release_check $(ARGS)

format: $(DEV_STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(DEV_STAMP) ## make the virtual environment in .venv, with everything for development

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The base Python's own torch, where there is one, is used as it is: a second one is large.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "poprun-py needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $$($(PYTHON) tools/venv_flags.py) $(VENV)
	$(PYTHON) tools/venv_flags.py --constraints > $(VENV)/constraints.txt
	@touch $@

$(STAMP): $(VENV)/.made setup.cfg setup.py constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --config-settings editable_mode=compat -e '.[examples]'
	@# As pip does with what it copies; some environments keep Python from doing it on first use.
	@$(BIN)/python -m compileall -q poprun_py popdist_py
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --config-settings editable_mode=compat -e '.[test,docs,examples,tutorials,sweeps]'
	@# Compile the tests and their assertions once. Else each worker of the first run would do it.
	@# A test file that cannot be imported is reported by make test, not here.
	@$(BIN)/python -m compileall -q tools
	@$(BIN)/python -m pytest -q -n 0 --collect-only tests >/dev/null 2>&1 || true
	@touch $@

# The trainers are 200 MB, which only the sweep needs.
$(FRAMEWORKS_STAMP): $(DEV_STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --config-settings editable_mode=compat -e '.[frameworks]'
	@touch $@

$(RELEASE_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --config-settings editable_mode=compat -e '.[release]'
	@touch $@
