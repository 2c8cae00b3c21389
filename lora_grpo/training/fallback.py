"""What only TRL's own code can do: arguments and models with which this package would not do the same."""

import sys
from typing import Any

from peft import LoraConfig
from transformers import GenerationMixin
from trl import GRPOConfig

from lora_grpo.config import UNREAD_FIELDS
from lora_grpo.models import TRAINABLE, base_of
from lora_grpo.training.trl_compat import has_own_generate, takes_images, unread_generation_settings

_GENERATE = GenerationMixin.generate
"""The `generate` of transformers, read on import, before a script may replace it."""


def unsupported_reason(trainer: Any) -> str:
    """Return which argument of a GRPOTrainer or property of its model this package does not support, or ""."""
    args = trainer.args
    model = trainer.model
    base = base_of(model)

    # The sampler would ignore a setting that is not TRL's default. None, 0, False and {} all turn a setting off.
    unread_fields = []
    for name in sorted(UNREAD_FIELDS):
        setting = getattr(args, name) or None
        default = GRPOConfig.__dataclass_fields__[name].default or None
        if setting != default:
            unread_fields.append(name)

    # After transformers' `add_adapter`, a model has adapters without PEFT's wrapper around it.
    adapters = getattr(model, "peft_config", {})
    is_wrapped_by_peft = base is not model
    has_lora_named_default = is_wrapped_by_peft and isinstance(adapters.get("default"), LoraConfig)
    devices = set((getattr(base, "hf_device_map", None) or {}).values())
    has_trainable_weight = any(parameter.requires_grad for parameter in model.parameters())

    applies = {
        "Unsloth's trainer has its own loss": "unsloth" in sys.modules,
        "`rollout_func` samples": trainer.rollout_func is not None,
        "`tools` and `environment_factory` need several turns": trainer.tools or trainer.environment_factories,
        "`use_vllm` samples": trainer.use_vllm,
        f"the sampler does not read {_quoted(unread_fields)}": unread_fields,
        "the processor takes images": takes_images(trainer),
        "the model is distributed": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "the model uses several GPUs in one process": len(devices) > 1 or args.n_gpu > 1,
        "the adapter is not PEFT's LoRA adapter named default": adapters and not has_lora_named_default,
        "`off_policy_mask_threshold` needs logprobs without `top_p`": args.off_policy_mask_threshold and args.top_p < 1,
        "the model has a recurrent state": base._is_stateful and base.config.model_type not in TRAINABLE,
        "`max_completion_length` is None": trainer.max_completion_length is None,
        "no weight is trainable (`is_trainable=True` loads an adapter for training)": not has_trainable_weight,
    }
    for reason, is_true in applies.items():
        if is_true:
            return reason
    return ""


def sampling_fallback_reason(trainer: Any) -> str:
    """Return why this package's sampler would not sample as TRL does now, or "". Scripts may change settings."""
    if has_own_generate(trainer.model, _GENERATE):
        return "the model has its own `generate`"
    unread_settings = unread_generation_settings(trainer)
    if unread_settings:
        return f"the sampler does not read {_quoted(unread_settings)} of the model's or trainer's generation_config"
    return ""


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
