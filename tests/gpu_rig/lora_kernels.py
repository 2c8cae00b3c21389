"""Tune vLLM's own LoRA kernel in Triton's interpreter, which runs it on a CPU, and print the timings as JSON.

    TRITON_INTERPRET=1 python tests/gpu_rig/lora_kernels.py

The times mean nothing. The products do: `tune` leaves out candidates that compute another one.
"""

import dataclasses
import json

import torch
from triton.backends import backends

backends["nvidia"].driver.is_active = staticmethod(lambda: True)  # otherwise vLLM replaces Triton

from vllm.utils import torch_utils  # noqa: E402

from lora_grpo.gpu_check import tune_kernels  # noqa: E402
from lora_grpo.hardware import ShrinkShape  # noqa: E402

torch_utils.PIN_MEMORY = False
tune_kernels._CALLS = 1

shapes = [ShrinkShape(slices, batch=5, width=576, rank=8) for slices in (1, 3)]
timings = tune_kernels.tune(shapes, device="cpu", dtype=torch.float16)  # the interpreter has no bfloat16
print(json.dumps([dataclasses.asdict(timing) for timing in timings]))
