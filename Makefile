# The environment: VENV=folder puts it elsewhere, PYTHON=python3.12 picks the Python for it,
# VLLM=0.30.0 another release of vLLM.
VENV ?= .venv
VLLM ?=
# How many tests run at once.
JOBS ?= 2
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help env demo test test-cuda lint matrix bench

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

env: ## make or update the environment: vLLM for CPUs, torch, the tools (some minutes, once)
	@python=$$(PYTHON='$(PYTHON)' sh scripts/find-python.sh) && \
	"$$python" scripts/environment.py '$(VENV)' $(VLLM)

demo: env ## profile a tiny model on a real vLLM server and show the analysis (no GPU needed)
	@'$(RUN)' demo/run.py

test: env ## run the tests; ARGS='-k name' goes to pytest
	@'$(RUN)' -m pytest -n $(JOBS) --dist loadfile $(ARGS)

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
