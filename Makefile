# The environment: VENV=folder puts it elsewhere, PYTHON=python3.12 picks the Python for it,
# VLLM=0.30.0 another release of vLLM.
VENV ?= .venv
VLLM ?=
# How many tests run at once.
JOBS ?= 3
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help env demo browser test test-cuda lint matrix bench attacks docs

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

env: ## make or update the environment: vLLM for CPUs, torch, the tools (some minutes, once)
	@python=$$(PYTHON='$(PYTHON)' sh scripts/find-python.sh) && \
	"$$python" scripts/environment.py '$(VENV)' $(VLLM)

demo: env ## profile a tiny model on a real vLLM server and show the analysis (no GPU needed)
	@'$(RUN)' demo/run.py

browser: env ## find a browser for the tests, or fetch one; PROFILEMATE_BROWSER=required fails without one
	@'$(RUN)' -m scripts.browser

test: browser ## run the tests; ARGS='-k name' goes to pytest
	@'$(RUN)' -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-cuda: env ## run the tests of vLLM's CUDA build, under CUDA_RUN='a command with a GPU': docs/cuda.md
	@test -n '$(CUDA_RUN)' || { echo "say CUDA_RUN='a command under which python has vLLM and a GPU'" >&2; exit 2; }
	@PROFILEMATE_CUDA_RUN='$(CUDA_RUN)' '$(RUN)' -m pytest tests/cuda $(ARGS)

lint: env ## check style (ruff), types (mypy) and who imports what (import-linter)
	@'$(RUN)' -m ruff check
	@'$(RUN)' -m ruff format --check
	@'$(RUN)' -m mypy
	@'$(VENV)/bin/lint-imports' --no-cache --no-logo

matrix: env ## check the tables on many vLLM releases (network): docs/releases.md; ARGS=--quick for eight
	@'$(RUN)' -m scripts.vllm_matrix $(ARGS)

bench: env ## measure what profiling costs, against the targets; ARGS='loop journal' for some, ARGS=--help lists them
	@'$(RUN)' -m benchmarks $(ARGS)

attacks: env ## try at length to break it: docs/reliability.md; ARGS='journals tables' for some, ARGS=--help lists them
	@'$(RUN)' -m attacks $(ARGS)

# The site's tools have an environment of their own, made anew when their list changes.
DOCS := .docs
DOCS_TOOLS := $(DOCS)/tools/.made

docs: $(DOCS_TOOLS) ## build the documentation as a site, in .docs/site; a broken link is an error
	@rm -rf $(DOCS)/source $(DOCS)/site && mkdir $(DOCS)/source
	@cp -r README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs $(DOCS)/source
	@$(DOCS)/tools/bin/zensical build --clean --strict
	@echo "$(DOCS)/site/index.html"

$(DOCS_TOOLS): requirements/docs.txt
	@python=$$(PYTHON='$(PYTHON)' sh scripts/find-python.sh) && "$$python" -m venv --clear $(DOCS)/tools
	@$(DOCS)/tools/bin/python -I -m pip install -q --no-deps --only-binary :all: --disable-pip-version-check -r $<
	@touch $@
