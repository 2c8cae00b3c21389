"""What a run is asked to do: settings, batch arithmetic, hardware, engines."""

from lora_grpo.config import hardware
from lora_grpo.config.batch import at_least, batch_shape, micro_batches
from lora_grpo.config.engines import as_with_gpu_extra, choose_engine, drawn_by, uses_vllm, vllm_available
from lora_grpo.config.hardware import Gpu, choose_preset, nvidia_gpus, preset_gigabytes, use_one_gpu
from lora_grpo.config.presets import Overrides, gpu_preset, starter_preset
from lora_grpo.config.schema import MIN_VALIDATION_ROWS, STARTER, DataConfig, Invocation, ModelConfig, RunConfig, flag
from lora_grpo.config.trl_fields import UNREAD_FIELDS, check_name, parse_grpo_overrides

__all__ = [
    "MIN_VALIDATION_ROWS",
    "STARTER",
    "UNREAD_FIELDS",
    "DataConfig",
    "Gpu",
    "Invocation",
    "ModelConfig",
    "Overrides",
    "RunConfig",
    "as_with_gpu_extra",
    "at_least",
    "batch_shape",
    "check_name",
    "choose_engine",
    "choose_preset",
    "drawn_by",
    "flag",
    "gpu_preset",
    "hardware",
    "micro_batches",
    "nvidia_gpus",
    "parse_grpo_overrides",
    "preset_gigabytes",
    "starter_preset",
    "use_one_gpu",
    "uses_vllm",
    "vllm_available",
]
