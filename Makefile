# From a fresh clone, with nothing set:
#
#   make demo     installs Outrider, then runs both services on the model pair in the repository
#   make test     installs Outrider, then runs the tests, with style, types and import rules
#   make test-llama  installs the extra `llama` (minutes where it builds llama.cpp), then runs the tests that need it
#   make gpu      tests and benchmarks on a GPU, in three runs of nine minutes (PART=1..3)
#
# Variables:
#
#   PYTHON=python3.12        the interpreter of a new environment (3.11 or later)
#   VENV=DIR                 the environment (.venv)
#   TORCH_INDEX=URL          another package index for torch; pip prefers its builds for a device (2.13.0+cpu)
#   PIP_ARGS="..."           more arguments for each pip install
#   PART=1                   make gpu: only this run
#   WHEELS=DIR               make gpu: folder with the packages that PYTHON lacks (wheels); make gpu-wheels fills it
#   DRY=1                    make gpu: tiny models on a CPU, in the environment of the tests
#   DEMO_ARGS, TEST_ARGS, BENCH_ARGS, GPU_ARGS
#                            more arguments for the command of that target

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
# Processes that run the tests, a file at a time; 0: one process.
TEST_WORKERS ?= 3
BENCH_ARGS ?=
PART ?=
WHEELS ?= wheels
DRY ?=
GPU_ARGS ?=

# Keep bytecode, also if the environment forbids it: services and tests import the same modules in many processes.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Python compiles a module when it first imports it: to compile all at once would take half of the installation.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_ARGS)

# A stamp for each set of extras. A change of the manifests, or of the C code, installs again.
MANIFEST := pyproject.toml constraints.txt $(wildcard kernels/*.c kernels/*.h)
SERVICE := $(VENV)/.installed-service
BENCH := $(VENV)/.installed-bench
DEV := $(VENV)/.installed-dev
LLAMA := $(VENV)/.installed-llama

.DEFAULT_GOAL := help
.PHONY: help demo demo-gguf test test-llama lint format protos reference docs bench gpu gpu-wheels clients constraints clean \
	install-code install-packages

help:
	@echo "make demo         run both services on the model pair in the repository"
	@echo "make test         run the tests, with style, types and import rules"
	@echo "make test-llama   install llama.cpp, which may build for minutes, and run the tests that need it"
	@echo "make demo-gguf    write the model pair as build/demo-*.gguf, for llama.cpp"
	@echo "make lint         style, types and import rules alone"
	@echo "make format       format the code"
	@echo "make protos       generate the stubs from the .proto files"
	@echo "make reference    generate settings.md and contract.md of docs/reference"
	@echo "make docs         build the documentation in site/, after make reference"
	@echo "make bench        measure the pair against the target alone"
	@echo "make gpu          test and measure on a GPU; PART=1, 2 or 3 for one run, DRY=1 for a trial on a CPU"
	@echo "make gpu-wheels   download the packages for make gpu that a machine with torch and transformers lacks"
	@echo "make clients      install the load and evaluation tools that tests/clients runs"
	@echo "make constraints  resolve all extras and write constraints.txt"
	@echo "make clean        remove the environment and the files of tools"

demo: $(SERVICE)
	@$(BIN)/outrider demo $(DEMO_ARGS)

# Files run in the order of their names: by default those with few but long tests come last, all in one worker.
test: $(DEV)
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

# A stage of its own in CI: where no wheel fits, pip builds llama.cpp for this machine's processor.
test-llama: $(LLAMA)
	@$(BIN)/python -m pytest -n 0 tests/outrider/runtime/test_gguf_convert.py tests/outrider/runtime/test_gguf_tokenizer.py \
		tests/outrider/runtime/test_llama_cells.py tests/outrider/runtime/test_llama_cpp.py \
		tests/outrider/runtime/test_llama_prefixes.py \
		tests/exactness/test_llama_cpp.py $(TEST_ARGS)

# The demo pair for llama.cpp, in bfloat16 and with its draft in 8 bits.
demo-gguf: $(LLAMA)
	@mkdir -p build
	@$(BIN)/outrider convert models/demo/target build/demo-target.gguf --type bf16
	@$(BIN)/outrider convert models/demo/draft build/demo-draft.gguf --type q8_0

# The generated pages first, so that the site has the current ones.
docs: reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html; to read and search it: $(BIN)/python -m http.server --directory site"

bench: $(BENCH)
	@$(BIN)/python -m benchmarks.pair $(BENCH_ARGS)

# With the torch of PYTHON, which fits its GPU, not with that of the environment.
GPU_PYTHON = $(if $(DRY),$(BIN)/python,$(PYTHON))
gpu: $(if $(DRY),$(DEV))
	@if ls $(WHEELS)/*.whl > /dev/null 2>&1; then \
		$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl; fi
	@PYTHONPATH=build/gpu$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m benchmarks.gpu \
		$(if $(DRY),--dry-run) $(if $(PART),--run $(PART)) $(GPU_ARGS)

# Without the usual dependencies of torch and transformers: the machine has those.
GPU_WHEELS = grpcio grpcio-health-checking grpcio-status grpcio-reflection protobuf googleapis-common-protos structlog \
	pydantic pydantic-core pydantic-settings annotated-types typing-inspection python-dotenv pytest-asyncio \
	pytest-timeout prometheus-client opentelemetry-api matplotlib click rich
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels:
	@$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
		--constraint constraints.txt --dest $(WHEELS) $(GPU_WHEELS)

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(DEV)
	@$(BIN)/python -m protos.generate

# settings.md from the code, contract.md from the comments of the .proto files.
reference: $(DEV)
	@$(BIN)/python docs/generate.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Outrider needs Python 3.11 or later; %s is %d.%d. Set PYTHON." % (sys.executable, *v))'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --constraint constraints.txt --upgrade pip  # that of Python 3.11 takes twice as long to resolve

# pip compiles our C code while another one installs the packages of the extras, $(1).
INSTALL = @$(MAKE) --no-print-directory --jobs=2 install-code install-packages EXTRAS="$(1)"

install-code:
	@$(PIP_INSTALL) --constraint constraints.txt --no-deps --editable .

install-packages:
	@$(BIN)/python deploy/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	@$(PIP_INSTALL) --constraint constraints.txt --requirement $(VENV)/requirements.txt

# Each set includes the one before, so installing one also renews the stamps of those.
$(SERVICE): $(MANIFEST) | $(BIN)/python
	@echo "Installing Outrider and the dependencies of its services into $(VENV)"
	$(call INSTALL,service)
	@touch $@

$(BENCH): $(MANIFEST) | $(BIN)/python
	@echo "Installing Outrider and the dependencies of its services and benchmarks into $(VENV)"
	$(call INSTALL,service bench)
	@touch $(SERVICE) $@

$(DEV): $(MANIFEST) | $(BIN)/python
	@echo "Installing Outrider and the dependencies of its services, benchmarks, tests and documentation into $(VENV)"
	$(call INSTALL,service bench dev docs)
	@touch $(SERVICE) $(BENCH) $@

$(LLAMA): $(MANIFEST) $(DEV)
	@echo "Installing llama.cpp into $(VENV); where no wheel fits, this builds it, in minutes"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[service,bench,dev,docs,llama]'
	@touch $(SERVICE) $(BENCH) $(DEV) $@

# For the tests in tests/clients, which are slow: lm-eval, GuideLLM and AIPerf, some 3 GB.
clients:
	@$(PYTHON) -m venv build/clients
	@build/clients/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--requirement tests/clients/requirements.txt

# In a fresh environment, without the developer's other packages. Dependencies of torch's CUDA builds depend on the build,
# so the file omits them, except triton for Linux.
constraints:
	@rm -rf build/constraints && mkdir -p build
	@$(PYTHON) -m venv build/constraints
	@build/constraints/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --upgrade pip
	@build/constraints/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--editable '.[service,bench,dev,docs,llama]'
	@sed '/^[^#]/,$$d' constraints.txt > build/constraints.txt
	@build/constraints/bin/python -m pip freeze --all --exclude-editable \
		| sed -E -e 's/\+[A-Za-z0-9.]+$$//' -e '/^(wheel|triton|nvidia-[^=]*|cuda-[^=]*)==/d' >> build/constraints.txt
	@grep '^triton==' constraints.txt >> build/constraints.txt
	@mv build/constraints.txt constraints.txt && rm -rf build/constraints

clean:
	@rm -rf $(VENV) build dist site kernels/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
