# The two commands are `make demo` and `make test`; `make help` lists the others.
# Settings: PYTHON (the interpreter for the environment), VENV (where it goes), and the build's own
# (PYSPEC_BACKENDS, CMAKE_ARGS, PYSPEC_BUILD_JOBS, ...: docs/install.md).

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Absolute, so that recipes may change the folder.
PY := $(abspath $(VENV))/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

export PYTHONUNBUFFERED := 1

.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-vulkan test-foreign lint types build build-cuda bench bench-compare bench-peers \
  sdist wheel clean distclean

help:
	@echo "make demo       install into $(VENV), get a small model, answer a prompt with and without speculation"
	@echo "make test       install into $(VENV) and run all checks: lint, types, tests"
	@echo "make test-fast  the same without the slow tests"
	@echo "make test-foreign  compile llama-cpp-python and test both in one process"
	@echo "make test-vulkan  headers and a software driver from Debian, the Vulkan backend, the exactness tests on it"
	@echo "make build      native libraries and extensions, in place"
	@echo "make build-cuda the same with the CUDA backend, for CUDA_ARCHITECTURES (90)"
	@echo "make wheel      a wheel for other machines; wheel-vulkan, wheel-cuda: a GPU's module; test-wheel: build and try it"
	@echo "make bench      time kernels, loop and models; make bench-compare BASE=rev: against an earlier revision"
	@echo "make bench-peers  against llama.cpp's tools and Python packages, which it builds and installs in a cache folder"
	@echo "make lint types sdist clean distclean"

# --- the environment: each stamp names what is installed, and is redone when the metadata changes ----------------------

$(VENV)/.stamp-base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is missing or older than 3.10. Set PYTHON to a newer one." >&2; exit 1; }
	@$(PYTHON) -m build_support
	@echo "== environment in $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) \
	  || { echo "error: no environment could be made. Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PIP) install $$($(PY) -c 'import re; print(*re.findall(r"\"([^\"]+)\"", \
	  re.search(r"^requires = (.*)$$", open("pyproject.toml").read(), re.M).group(1)))')
	@touch $@

# The libraries are built here, not inside pip, because pip hides a build's progress. Does nothing when all is current.
build: $(VENV)/.stamp-base
	@echo "== native libraries and extensions"
	@packages=$$($(PY) -m build_support requirements) && { test -z "$$packages" || $(PIP) install $$packages; }
	@$(PY) setup.py -q build_ext --inplace

# For the GPUs of CUDA_ARCHITECTURES (90: H100, H200), whether there is one here or not. Half an hour on two cores.
CUDA_ARCHITECTURES ?= 90
build-cuda: export PYSPEC_BACKENDS := cuda $(PYSPEC_BACKENDS)
build-cuda: export CUDAARCHS := $(CUDA_ARCHITECTURES)
build-cuda: build

$(VENV)/.stamp-demo: $(VENV)/.stamp-base | build
	@echo "== pyspec with what the command line needs"
	$(PIP) install --no-build-isolation -e '.[cli]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-base | build
	@echo "== pyspec with what the tests need"
	$(PIP) install --no-build-isolation -e '.[test,dev]'
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-base | build
	$(PIP) install --no-build-isolation -e '.[bench,test]'
	@touch $@

$(VENV)/.stamp-wheel: $(VENV)/.stamp-base | build
	$(PIP) install --no-build-isolation -e '.[wheel]'
	@touch $@

# --- commands --------------------------------------------------------------------------------------------------------------

demo: build $(VENV)/.stamp-demo
	@echo "== the model"
	@$(PY) examples/get_models.py smollm2
	@echo "== the demo"
	@$(PY) examples/demo.py

test: lint types
	@echo "== tests"
	@$(PY) -m pytest $(PYTEST_ARGS)

# Compiles llama-cpp-python, some minutes, and runs it beside pyspec in one process.
test-foreign: build $(VENV)/.stamp-test
	$(PIP) install llama-cpp-python
	@$(PY) -m pytest tests/packaging/test_llama_cpp_python.py $(PYTEST_ARGS)

# The exactness suite on a Vulkan device, which Mesa's llvmpipe is on any machine: target there and draft on the CPU, the
# other way round, both there. ggml leaves software devices out unless they are named by number.
VULKAN_TESTS ?= tests/exactness/test_greedy.py -k test_a_few_tokens -o timeout=1200
test-vulkan: export VULKAN_SDK := $(CURDIR)/build/vulkan-sdk
test-vulkan: export GGML_VK_VISIBLE_DEVICES := 0
# llvmpipe compiles a kernel for seconds at its first use. The compiled ones are kept for all processes.
test-vulkan: export MESA_SHADER_CACHE_DIR := $(CURDIR)/build/mesa-cache
test-vulkan: export PYSPEC_BACKENDS := vulkan
test-vulkan: export PYSPEC_TEST_REQUIRE := native,device
test-vulkan:
	@$(PYTHON) -m build_support.vulkan_sdk "$$VULKAN_SDK"
	@$(MAKE) --no-print-directory build $(VENV)/.stamp-test
	@echo "== target and draft on Vulkan"
	@PYSPEC_TEST_TARGET=Vulkan0 PYSPEC_TEST_DRAFT=Vulkan0 $(PY) -m pytest $(VULKAN_TESTS) $(PYTEST_ARGS)
	@echo "== target on Vulkan, draft on the CPU"
	@PYSPEC_TEST_TARGET=Vulkan0 PYSPEC_TEST_DRAFT=CPU $(PY) -m pytest $(VULKAN_TESTS) $(PYTEST_ARGS)
	@echo "== target on the CPU, draft on Vulkan"
	@PYSPEC_TEST_TARGET=CPU PYSPEC_TEST_DRAFT=Vulkan0 $(PY) -m pytest $(VULKAN_TESTS) $(PYTEST_ARGS)
	@echo "== devices"
	@$(PY) -m pytest tests/device -o timeout=1200 $(PYTEST_ARGS)

test-fast: lint types
	@$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

lint: build $(VENV)/.stamp-test
	@echo "== lint"
	@$(PY) -m ruff check .
	@PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint pyspec

types: build $(VENV)/.stamp-test
	@echo "== types"
	@$(PY) -m mypy

bench: build $(VENV)/.stamp-bench
	@$(PY) -m pytest benchmarks --benchmark-enable --benchmark-only $(PYTEST_ARGS)

# BENCH_ARGS goes to benchmarks/bench_compare.py, for example BENCH_ARGS="--rounds 5 -- -k argmax"
bench-compare: build $(VENV)/.stamp-bench
	@test -n "$(BASE)" || { echo "error: which revision? make bench-compare BASE=main" >&2; exit 2; }
	@$(PY) benchmarks/bench_compare.py $(BASE) $(BENCH_ARGS)

# PEERS_ARGS goes to benchmarks/peers.py, for example PEERS_ARGS="--cases llama-bench,eagle3 --repeats 1"
bench-peers: build $(VENV)/.stamp-bench
	@$(PY) benchmarks/peers.py $(PEERS_ARGS)

sdist: $(VENV)/.stamp-test
	@$(PY) -m build --sdist --no-isolation

# For other machines: all CPU variants. The backend modules of GPUs are wheels of their own.
wheel: $(VENV)/.stamp-wheel
	@$(PY) -m build_support.wheel

.PHONY: wheel-vulkan wheel-cuda test-wheel
wheel-vulkan: export VULKAN_SDK ?= $(wildcard $(CURDIR)/build/vulkan-sdk)
wheel-cuda: export CUDAARCHS ?= $(CUDA_ARCHITECTURES)
wheel-vulkan wheel-cuda: wheel-%: $(VENV)/.stamp-wheel
	@$(PY) -m build_support.wheel $*

# The newest wheel in dist, in a new environment, on this CPU and on older ones (qemu-user, if it is there).
test-wheel: wheel $(VENV)/.stamp-test
	@PYSPEC_TEST_WHEEL="$$(ls -t dist/pyspec_llm-*.whl | head -n 1)" \
	  $(PY) -m pytest tests/packaging/test_wheel.py -rs $(PYTEST_ARGS)

# clean keeps what was fetched and the environment; distclean does not.
clean:
	rm -rf build dist *.egg-info pyspec/_build_info.py pyspec/backends/lib
	find pyspec -name '*.so' -delete

distclean: clean
	rm -rf $(VENV) models vendor/ggml/llama.cpp .pytest_cache .mypy_cache .ruff_cache
