"""This machine: its GPUs and memory, and what `auto` chooses for it. Imports no torch.

    choose_engine(config)                # "unsloth" or "peft", from the packages and the GPU
    driver_problem(nvidia_gpus()[0])     # why the driver cannot run the installed PyTorch, or None

machine.py          resolves `auto` to a preset, an engine and a sampling backend
nvidia.py           the GPUs that nvidia-smi lists, and whether their driver can run the installed PyTorch
lora_kernels.py     tables with which vLLM launches its LoRA kernels: measured, or reproducible
measured_engine.py  the engine and backend that `check-gpu` measured as the fastest
"""

from lora_grpo.hardware import machine
from lora_grpo.hardware.lora_kernels import (
    ShrinkKernel,
    ShrinkShape,
    save_reproducible,
    save_tuned,
    use_tables,
    vllm_default,
)
from lora_grpo.hardware.machine import (
    check_vllm_quantizes,
    choose_engine,
    choose_preset,
    flags_of_vllm,
    sampler_kind,
    settings_of_vllm,
    use_one_gpu,
    uses_gpu,
    uses_vllm,
    vllm_available,
    vllm_extra,
    vllm_serves,
    vllm_version,
    with_gpu_defaults,
)
from lora_grpo.hardware.measured_engine import (
    MeasuredEngine,
    measured_engine,
    measured_engine_file,
    save_measured_engine,
)
from lora_grpo.hardware.nvidia import driver_problem, nvidia_gpus
