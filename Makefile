# Every command of the project. `make` alone lists them.

VENV    := .venv
PYTHON_ := $(VENV)/bin/python
WORKERS ?= 2
export WORKERS

SOURCES = $(shell find src -type f -not -name '*.pyc' -not -path '*.egg-info/*')
ENGINE_SOURCES = $(shell find docker/engine-cpu/src -type f -not -name '*.pyc' \
                   -not -path '*.egg-info/*')
TYPED = docker/engine-cpu/src demo ci docker/prune.py docker/connector docker/sglang-gpu \
        helm/hicache-nixl/files/prompt-twice.py

.DEFAULT_GOAL := help
.PHONY: help venv demo test bench images sbom chart lint format clean

help: ## List the commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 14

venv: $(VENV)/.project $(VENV)/.engine $(VENV)/.warm ## Set up .venv with the built wheels
	@:

demo: venv ## The real SGLang keeps its KV cache through a kill
	@$(PYTHON_) -m demo

test: lint venv .sglang/.pins .helm/.pins ## Lint, types and all tests; reports/junit.xml
	@ci/test.sh $(VENV) $(PYTEST_OPTIONS)

bench: venv ## Measure against the in-tree connector and the bare device
	@FIO=1 ci/system.sh check
	@$(PYTHON_) -m bench $(BENCH_OPTIONS)

images: ## Build the container images; docs/containers.md
	@ci/docker.sh
	@ci/base-images.sh
	@ci/images.sh

sbom: ## What an image holds, as CycloneDX; IMAGE=connector
	@docker run --rm --pull never --entrypoint cat hicache-nixl/$(or $(IMAGE),connector):$(or $(TAG),local) \
		/usr/local/share/sbom.cdx.json

chart: venv ## The table of values in the chart's README
	@$(PYTHON_) ci/chart_readme.py helm/hicache-nixl

lint: venv ## ruff and mypy
	@$(PYTHON_) -m ruff check --quiet .
	@$(PYTHON_) -m ruff format --quiet --check .
	@$(PYTHON_) -m mypy --no-error-summary
	@$(PYTHON_) -m mypy --no-error-summary --strict $(TYPED)

format: venv ## Let ruff rewrite the sources
	@$(PYTHON_) -m ruff check --quiet --fix .
	@$(PYTHON_) -m ruff format --quiet .

clean: ## Remove everything the other commands make
	rm -rf $(VENV) .sglang .helm build dist reports .demo .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.pins: requirements.lock ci/make-venv.sh ci/system.sh
	@ci/make-venv.sh $(VENV)

$(VENV)/.project: $(VENV)/.pins pyproject.toml ci/install-wheel.sh $(SOURCES)
	@ci/install-wheel.sh $(VENV) . dist/project
	@touch $@

$(VENV)/.engine: $(VENV)/.pins docker/engine-cpu/pyproject.toml ci/install-wheel.sh $(ENGINE_SOURCES)
	@ci/install-wheel.sh $(VENV) docker/engine-cpu dist/engine-cpu
	@touch $@

.sglang/.pins: $(VENV)/.pins ci/sglang-versions.sh ci/sglang-versions.txt
	@ci/sglang-versions.sh $(VENV) .sglang
	@touch $@

.helm/.pins: ci/helm-tools.txt ci/helm-tools.sh
	@ci/helm-tools.sh .helm
	@touch $@

# SGLang compiles its page hash at the first request that needs it.
$(VENV)/.warm: $(VENV)/.engine
	@echo "compiling SGLang's page hash"
	@SGLANG_PLATFORM=hicache_cpu $(PYTHON_) -m engine_cpu.warm
	@touch $@
