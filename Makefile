# From a fresh clone, with nothing set:
#
#   make demo     environment, install, and the two services at work on the model pair in the repository
#   make test     the same for the tests; style, types and import rules are among them
#   make gpu      what a GPU machine is for: choices, tests and benchmarks, in three runs of nine minutes (PART=1..3)
#
# What may be set:
#
#   PYTHON=python3.12        the interpreter of a new environment (3.11 or later)
#   VENV=DIR                 where the environment lies (.venv)
#   TORCH_INDEX=URL          one more index, where torch is looked for too: a build named there for a device
#                            (2.13.0+cpu) goes before the plain one
#   PIP_ARGS="..."           further arguments of every pip install; pip's own configuration holds as well
#   PART=1, WHEELS=DIR, DRY=1
#                            of make gpu: one run of the three; a folder of wheels that PYTHON lacks (wheels), which
#                            make gpu-wheels fills where there is a package index; all of it with tiny models on a CPU,
#                            in the environment of the tests
#   DEMO_ARGS, TEST_ARGS, BENCH_ARGS, GPU_ARGS
#                            further arguments of the command that the target runs

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
# Processes that share the tests, a file at a time; 0: all in one.
TEST_WORKERS ?= 3
BENCH_ARGS ?=
PART ?=
WHEELS ?= wheels
DRY ?=
GPU_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_ARGS)

# One stamp for each set of extras. They are renewed when what is to be installed changes, and not before.
MANIFEST := pyproject.toml constraints.txt
SERVICE := $(VENV)/.installed-service
BENCH := $(VENV)/.installed-bench
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test lint format protos reference docs bench gpu gpu-wheels constraints clean

help:
	@echo "make demo         run both services on the model pair in the repository"
	@echo "make test         run the tests, with style, types and import rules"
	@echo "make lint         style, types and import rules alone"
	@echo "make format       put the code into the one format"
	@echo "make protos       write the stubs anew from the .proto files"
	@echo "make reference    write the generated pages of docs/reference anew"
	@echo "make docs         build the site of the documentation in site/, after the generated pages"
	@echo "make bench        measure the pair against the target alone"
	@echo "make gpu          test and measure on a GPU; PART=1, 2 or 3 for one run, DRY=1 for a trial on a CPU"
	@echo "make gpu-wheels   download what a machine with torch and transformers lacks for it"
	@echo "make constraints  resolve all extras anew and write constraints.txt"
	@echo "make clean        remove the environment and what the tools leave behind"

demo: $(SERVICE)
	@$(BIN)/outrider demo $(DEMO_ARGS)

# Bytecode is kept, whatever the environment says: three processes read all tests, and start hundreds more.
# In the order of their names: by the number of their tests, files of few and long ones would come last, to one worker.
test: $(DEV)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

# The generated pages first, so that the site has them as the code and the contract are now.
docs: reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html; to read and search it: $(BIN)/python -m http.server --directory site"

bench: $(BENCH)
	@$(BIN)/python -m benchmarks.pair $(BENCH_ARGS)

# With the torch of PYTHON, which fits its GPU, and not with one of an environment of ours.
GPU_PYTHON = $(if $(DRY),$(BIN)/python,$(PYTHON))
gpu: $(if $(DRY),$(DEV))
	@if ls $(WHEELS)/*.whl > /dev/null 2>&1; then \
		$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl; fi
	@PYTHONPATH=build/gpu$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m benchmarks.gpu \
		$(if $(DRY),--dry-run) $(if $(PART),--run $(PART)) $(GPU_ARGS)

# What is usual beside torch and transformers is left out: the machine has it.
GPU_WHEELS = grpcio grpcio-health-checking grpcio-status grpcio-reflection protobuf googleapis-common-protos structlog \
	pydantic pydantic-core pydantic-settings annotated-types typing-inspection python-dotenv pytest-asyncio \
	pytest-timeout prometheus-client matplotlib click rich
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

# settings.md and contract.md, from the code and from the comments of the .proto files.
reference: $(DEV)
	@$(BIN)/python docs/generate.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Outrider needs Python 3.11 or later; %s is %d.%d. Set PYTHON." % (sys.executable, *v))'
	@$(PYTHON) -m venv $(VENV)

# Each set holds the one before it, so installing one marks those as done too.
$(SERVICE): $(MANIFEST) | $(BIN)/python
	@echo "Installing Outrider and what its services need into $(VENV)"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[service]'
	@touch $@

$(BENCH): $(MANIFEST) | $(BIN)/python
	@echo "Installing Outrider and what its services and benchmarks need into $(VENV)"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[service,bench]'
	@touch $(SERVICE) $@

$(DEV): $(MANIFEST) | $(BIN)/python
	@echo "Installing Outrider and what its services, benchmarks, tests and documentation need into $(VENV)"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[service,bench,dev,docs]'
	@touch $(SERVICE) $(BENCH) $@

# In an environment of its own, so that what else a developer has installed stays out. What a CUDA build of torch
# brings besides depends on the build, so the file names none of it, save triton, for Linux.
constraints:
	@rm -rf build/constraints && mkdir -p build
	@$(PYTHON) -m venv build/constraints
	@build/constraints/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--editable '.[service,bench,dev,docs]'
	@sed '/^[^#]/,$$d' constraints.txt > build/constraints.txt
	@build/constraints/bin/python -m pip freeze --all --exclude-editable \
		| sed -E -e 's/\+[A-Za-z0-9.]+$$//' -e '/^(pip|wheel|triton|nvidia-[^=]*|cuda-[^=]*)==/d' >> build/constraints.txt
	@grep '^triton==' constraints.txt >> build/constraints.txt
	@mv build/constraints.txt constraints.txt && rm -rf build/constraints

clean:
	@rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
