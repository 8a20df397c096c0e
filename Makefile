# make help says what there is. Every target sets up what it needs; nothing is to be installed first.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

TASK ?= detection
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAIN := $(BIN)/valora-train task=$(TASK) $(ARGS)
BASE := $(BIN)/python -m valora_train.base_model.pretrain --out data/valora_data/tiny

# The first Python that we support.
PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3,$(shell \
	$(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $(p))))

.PHONY: help
help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  TASK=detection  which task (classification, detection, video, vqa, caption, grounding,'
	@echo '                  counting, mixed); ARGS="fusion=paper train.seed=1" further settings'

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: install one, or name it with PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV)/ (some minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	@touch $@

.PHONY: setup
setup: $(READY) ## Make the virtual environment

.PHONY: fuse teach distill export
fuse: $(READY) ## From small models to a checked bundle in bundles/TASK
	@$(TRAIN)
teach: $(READY) ## Only train or load the small models
	@$(TRAIN) command=teach
distill: $(READY) ## Up to what the small models say
	@$(TRAIN) command=distill
export: fuse ## The same as fuse: what is up to date is not made again

.PHONY: verify
verify: $(READY) ## Check files, base model and golden examples of bundles/TASK
	@$(BIN)/python -m valora_train.stages.gate bundles/$(TASK)

.PHONY: serve
serve: $(READY) ## Serve bundles/TASK at localhost:8000 (ARGS="--port 8001")
	@test -f bundles/$(TASK)/bundle.json || { echo "There is no bundles/$(TASK) yet: make fuse TASK=$(TASK)" >&2; exit 1; }
	@$(BIN)/valora-serve bundles/$(TASK) $(ARGS)

.PHONY: curve
curve: $(READY) ## Accuracy against the number of TASK's domains in one adapter (docs/tasks.md)
	@$(BIN)/valora-train task=$(TASK) command=fuse fusion.margin=-10 $(ARGS)
	@$(BIN)/python -m valora_train.fusion.curve "$$(ls -td .valora/fuse-$(TASK)-*[0-9a-f]/ | head -1)" --picture curve-$(TASK).png

.PHONY: ui
ui: $(READY) ## See every fusion step in MLflow
	@$(BIN)/mlflow ui

.PHONY: base
base: $(READY) ## Make the base model valora-tiny again (minutes on a GPU)
	@$(BASE) --minutes 9.2 --batch 768 --rate 1.5e-3 --seed 0
	@$(BASE) --minutes 8.7 --batch 1024 --rate 1e-3 --seed 1 --start data/valora_data/tiny
	@$(BASE) --minutes 6.6 --batch 1024 --rate 6e-4 --seed 2 --start data/valora_data/tiny
	@$(BASE) --evaluate --questions 300

.PHONY: test test-fast test-slow test-gpu lint format
test: lint test-fast ## Style, types and tests
test-fast: $(READY) ## The tests that take no minutes
	@$(BIN)/python -m pytest -m 'not slow and not gpu' $(ARGS)
test-slow: $(READY) ## The end-to-end cases
	@$(BIN)/python -m pytest -m slow $(ARGS)
test-gpu: $(READY) ## The tests that need a CUDA GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)
lint: $(READY) ## Style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
format: $(READY) ## Put the style right
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench-http
bench-http: $(READY) ## Overhead of the HTTP side, connections held, memory over 20,000 requests
	@$(BIN)/python tests/bench/valora_serve/bench_http.py $(ARGS)

.PHONY: bench-serve
bench-serve: $(READY) ## Time the runtime end to end on a 7B shape (needs a CUDA GPU)
	@$(BIN)/python -m tests.bench.valora_serve.bench_serve $(ARGS)

.PHONY: bench-kernels
bench-kernels: $(READY) ## Time the LoRA kernels beside their peers (needs a CUDA GPU)
	@$(BIN)/python tests/bench/valora_kernels/bench_atmm.py $(ARGS)

.PHONY: clean
clean: ## Delete what stages made; bundles, MLflow's store and the environment stay
	@rm -rf .valora outputs multirun .pytest_cache .ruff_cache .mypy_cache .hypothesis
