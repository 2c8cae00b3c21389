"""`--grpo KEY=VALUE` for any field of TRL's GRPOConfig.

Importing TRL takes seconds and loads torch. So the text is parsed at once, and the names and types of the fields are
checked against GRPOConfig before a model is loaded, but not for `--plan`. TRL's constructor does not suffice: Unsloth's
patched GRPOConfig only warns about an unknown field and drops it, and neither checks types.
"""

from collections.abc import Sequence
from typing import Any, get_type_hints

from lora_grpo.config.schema import ModelConfig, RunConfig, SamplingConfig, TrainConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.flags import flag

_OTHER_NAMES = {
    "--resume": ("resume_from_checkpoint",),
    "--seed": ("data_seed", "shuffle_dataset"),
    "--train.max-steps": ("num_train_epochs",),
    "--train.micro-batch-size": ("per_device_train_batch_size",),
    "--train.prompts-per-step": ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    "--train.gradient-checkpointing": ("activation_checkpointing",),
    "--train.lr-scheduler": ("lr_scheduler_type",),
    "--train.optimizer": ("optim",),
    "--train.checkpoint-steps": ("save_steps", "save_strategy", "save_only_model"),
    "--train.keep-checkpoints": ("save_total_limit",),
    "--train.completions-steps": (
        *("log_completions", "log_unique_prompts", "log_multimodal", "num_completions_to_print"),
        "log_completions_hub_repo",
    ),
    "--rewards": ("reward_weights",),
    "--sampling.max-completion-tokens": ("max_completion_length",),
    "nothing: every process needs the whole model": ("fsdp", "deepspeed", "parallelism_config"),
    "lora_grpo": ("logging_strategy", "logging_steps", "remove_unused_columns"),
}
"""Flag -> the fields of GRPOConfig that it sets and that have another name.

In place of a flag: what a message names as their source.
"""

CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
"""Allowed values of fields that TRL checks only after sampling the first step."""

UNREAD_FIELDS = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "cache_implementation",
    "use_transformers_continuous_batching",
    "max_tool_calling_iterations",
}
"""Fields that TRL's generation uses and the samplers of lora_grpo ignore."""


def owner_of(field: str) -> str | None:
    """Return the flag that sets a field of GRPOConfig. `--grpo` rejects it, so that each field has only one source."""
    if field.startswith(("use_vllm", "vllm_")) and not field.startswith("vllm_importance_sampling"):
        return "--sampling.backend, --sampling.server-url and --model.gpu-memory-share"
    if field.startswith(("push_to_hub", "hub_")):
        return "nothing: `lora-grpo push` uploads the finished adapter"
    # A setting with the same name.
    sections = (("", RunConfig), ("train.", TrainConfig), ("sampling.", SamplingConfig), ("model.", ModelConfig))
    for prefix, section in sections:
        if field in section.__dataclass_fields__:
            return flag(prefix + field)
    for owner, fields in _OTHER_NAMES.items():
        if field in fields:
            return owner
    return None


def parse_grpo_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Parse `["loss_type=dr_grpo", "entropy_coef=0.01"]` without TRL: values are parsed as YAML.

    Raises:
        UserError: an item is not KEY=VALUE, a field is repeated, has a flag of its own, or TRL does not know its value.
    """
    import yaml

    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"--grpo {item!r} is not KEY=VALUE, e.g. --grpo loss_type=dr_grpo")
        owner = owner_of(key)
        if owner:
            raise UserError(f"--grpo {key} is set by {owner}")
        if key in overrides:
            raise UserError(f"--grpo {key} is repeated")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--grpo {item} cannot be read: {str(error).splitlines()[0]}") from None
        if key in CHOICES and overrides[key] not in CHOICES[key]:
            raise UserError(f"--grpo {item} is unknown to TRL; expected one of {', '.join(CHOICES[key])}")
    return overrides


def field_of_micro_batches(items: Sequence[str]) -> str | None:
    """Return the field of `--grpo` with which the loss depends on the size of micro-batches, or None.

    With it, TRL takes a mean or a quantile over the tokens of each micro-batch, and not over those of the step.
    """
    overrides = parse_grpo_overrides(items)
    is_on = {
        "loss_type": overrides.get("loss_type") == "bnpo",
        "entropy_coef": overrides.get("entropy_coef") not in (None, 0),
        "use_adaptive_entropy": overrides.get("use_adaptive_entropy") not in (None, False),
        "top_entropy_quantile": overrides.get("top_entropy_quantile") not in (None, 1),
    }
    return next((f"{name}={overrides[name]}" for name, on in is_on.items() if on), None)


def typed_grpo_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments of GRPOConfig, with the types of its fields. Imports TRL.

    Raises:
        UserError: GRPOConfig has no such field, or the field has another type.
    """
    if not items:
        return {}
    from pydantic import TypeAdapter, ValidationError
    from trl import GRPOConfig

    types = get_type_hints(GRPOConfig)
    overrides = parse_grpo_overrides(items)
    for item in items:
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in types:
            hint = suggestion(key, types, otherwise="see TRL's GRPOConfig for its fields")
            raise UserError(f"--grpo {key!r} is not a field of the installed GRPOConfig; {hint}")
        field_type = TypeAdapter(types[key])
        try:
            overrides[key] = field_type.validate_python(overrides[key])
        except ValidationError:
            try:
                overrides[key] = field_type.validate_python(text)  # run_name=2026-11-21 is a name, not a date
            except ValidationError as error:
                raise UserError(f"--grpo {key}={text}: {error.errors()[0]['msg']}") from None
    return overrides
