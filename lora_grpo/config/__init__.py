"""The settings of a run, and the values that can be derived from them without a model.

    config = replace(RunConfig(), gpu_preset("Qwen/Qwen2.5-0.5B-Instruct", train={"max_steps": 100}))
    check_fields(config)                 # checks types and ranges; the error names the flag
    batch_shape(config)                  # completions per step, accumulation steps, micro-batch size
    choose_engine(config)                # "unsloth" or "peft", from the packages and the GPU

schema.py       RunConfig and its sections: every setting with its default, unit and range
presets.py      defaults that the recipes' presets share
batch.py        splits an optimizer step into micro-batches
nvidia.py       this machine's GPUs, and whether their driver can run the installed PyTorch
hardware.py     resolves `auto` to a preset, an engine and a backend for this machine
measured_engine.py  the choice of `check-gpu`, for `auto`
trl_fields.py   parses `--grpo KEY=VALUE`, and checks it against TRL's GRPOConfig
"""

from lora_grpo.config import hardware
from lora_grpo.config.batch import batch_shape, micro_batches, prompts_to_read
from lora_grpo.config.hardware import (
    choose_engine,
    choose_preset,
    local_sampler,
    use_one_gpu,
    uses_gpu,
    uses_vllm,
    vllm_available,
    vllm_serves,
    with_gpu_defaults,
)
from lora_grpo.config.measured_engine import MeasuredEngine, measured_engine, save_measured_engine
from lora_grpo.config.nvidia import driver_problem, nvidia_gpus
from lora_grpo.config.presets import LAPTOP_FOLDER, LAPTOP_MODEL, gpu_preset, laptop_preset, starter_preset
from lora_grpo.config.schema import (
    MIN_VALIDATION_ROWS,
    STARTER,
    UNUSED_BY_SFT,
    DataConfig,
    Invocation,
    ModelConfig,
    Overrides,
    RunConfig,
    SamplingConfig,
    check_fields,
    endless_steps,
    replace,
)
from lora_grpo.config.trl_fields import UNREAD_FIELDS, parse_grpo_overrides, typed_grpo_overrides
