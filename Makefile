# Set-up, tests and checks. Everything runs in .venv, which each target makes when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= .cache/models/SmolLM2-135M-Instruct
JOBS ?= 2
NATIVE_SOURCES := $(shell find csrc protos -name '*.cpp' -o -name '*.hpp' -o -name 'CMakeLists.txt' -o -name '*.pyi')
PACKAGE_SOURCES := $(shell find protos neo_server gpu_worker cpu_attn_worker csrc/neo_native -name '*.py')
CPP_SOURCES := $(shell find csrc protos tests/cpp -name '*.cpp' -o -name '*.hpp')

.PHONY: setup demo test soak lint format model clean test-cpp test-gpu test-sanitizers

setup: $(VENV)/.installed

$(VENV)/.deps: pyproject.toml constraints.txt scripts/setup_venv.sh
	PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup_venv.sh
	touch $@

$(VENV)/.installed: $(VENV)/.deps $(NATIVE_SOURCES) $(PACKAGE_SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	touch $@

$(MODEL)/model.safetensors: | $(VENV)/.deps
	$(BIN)/python scripts/fetch_demo_model.py --out $(MODEL)

model: $(MODEL)/model.safetensors

demo: setup model
	$(BIN)/python scripts/demo.py $(MODEL)

test: setup model test-cpp
	NEO_TEST_MODEL="$(abspath $(MODEL))" $(BIN)/python -m pytest -n $(JOBS) --dist loadscope -m "not soak" $(PYTEST_ARGS)

soak: export NEO_STRESS_MESSAGES = 1000000
soak: setup model test-cpp test-sanitizers
	NEO_TEST_MODEL="$(abspath $(MODEL))" $(BIN)/python -m pytest -n $(JOBS) -m soak --timeout 3600 $(PYTEST_ARGS)

test-cpp: setup
	BUILD=build/cpp PATH="$(abspath $(BIN)):$$PATH" scripts/test_cpp.sh

# On a machine with a CUDA device: the kernels, then whole servers. Stops at the fifth failure.
test-gpu: setup model
	$(BIN)/python -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no CUDA device')"
	NEO_TEST_MODEL="$(abspath $(MODEL))" $(BIN)/python -m pytest tests/gpu --maxfail 5 $(PYTEST_ARGS)

# The C++ tests under ThreadSanitizer, and under AddressSanitizer with UBSan.
test-sanitizers: setup
	BUILD=build/tsan SANITIZE=thread PATH="$(abspath $(BIN)):$$PATH" scripts/test_cpp.sh
	BUILD=build/asan SANITIZE=address,undefined PATH="$(abspath $(BIN)):$$PATH" scripts/test_cpp.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=csrc $(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/python scripts/gen_protos.py --check

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache $(VENV)/.installed
