"""Parses `--grpo KEY=VALUE` for any field of TRL's GRPOConfig, checked against the installed source without import.

Importing TRL takes seconds and loads torch, so field names and annotations are parsed from three source files. Unknown
keys are rejected here, because Unsloth's patched GRPOConfig only warns about them and drops them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, suggestion

_FIELDS_OF_FLAGS = {
    "--output-dir": "output_dir",
    "--resume": "resume_from_checkpoint",
    "--seed": "seed data_seed shuffle_dataset",
    "--train.max-steps": "max_steps num_train_epochs",
    "--train.micro-batch-size": "per_device_train_batch_size",
    "--train.prompts-per-step": "gradient_accumulation_steps steps_per_generation generation_batch_size",
    "--train.learning-rate": "learning_rate",
    "--train.lr-scheduler": "lr_scheduler_type",
    "--train.warmup-steps": "warmup_steps",
    "--train.beta": "beta",
    "--train.max-grad-norm": "max_grad_norm",
    "--train.optimizer": "optim",
    "--train.gradient-checkpointing": "gradient_checkpointing",
    "--train.checkpoint-steps": "save_steps save_strategy save_only_model",
    "--train.keep-checkpoints": "save_total_limit",
    "--train.report-to": "report_to",
    "--rewards": "reward_weights",
    "--sampling.num-generations": "num_generations",
    "--sampling.max-completion-tokens": "max_completion_length",
    "--sampling.temperature": "temperature",
    "--sampling.top-p": "top_p",
    "--sampling.backend": "use_vllm vllm_mode vllm_model_impl",
    "--sampling.server-url": (
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port"
    ),
    "--model.gpu-memory-share": "vllm_gpu_memory_utilization",
    "--model.chat-template-kwargs": "chat_template_kwargs",
    "--model.max-sequence-tokens": "vllm_max_model_length",
    "the kit": "vllm_enable_sleep_mode logging_strategy logging_steps remove_unused_columns",
    "nothing: each process runs its own vLLM": "vllm_tensor_parallel_size",
    "nothing: the kit's samplers do not constrain completions": "vllm_structured_outputs_regex",
    "nothing: `lora-grpo push` uploads the finished adapter": (
        "push_to_hub hub_token hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision"
    ),
}
OWNED_FIELDS = {field: flag for flag, fields in _FIELDS_OF_FLAGS.items() for field in fields.split()}
"""GRPOConfig field -> the flag that sets it. `--grpo` rejects these fields, so that each has only one source."""

_SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
"""Allowed values of fields that TRL 1.14 checks only after sampling the first step."""

UNREAD_FIELDS = {"top_k", "min_p", "repetition_penalty", "generation_kwargs", "cache_implementation"}
UNREAD_FIELDS |= {"use_transformers_continuous_batching"}
"""Fields that TRL's generation uses and the kit's samplers ignore."""


_SIGNED_FIELDS = {"local_rank", "top_k", "entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"}
"""Fields in which a negative number means something. TRL checks none of them."""


@functools.cache
def grpo_fields() -> dict[str, str]:
    """Return every field of the installed GRPOConfig, with its annotation as text."""
    statements = itertools.chain.from_iterable(_class_body(*source) for source in _SOURCES)
    return {
        statement.target.id: ast.unparse(statement.annotation)
        for statement in statements
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _class_body(package: str, relative: str, class_name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"{package} is not installed; run `pip install -e .` in the project's folder")
    tree = ast.parse((Path(spec.origin).parent / relative).read_text(encoding="utf-8"))
    return next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name)


def parse_grpo_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Convert `["loss_type=dr_grpo", "entropy_coef=0.01"]` to keyword arguments of GRPOConfig. Values are YAML."""
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"--grpo {item!r} is not KEY=VALUE, e.g. --grpo loss_type=dr_grpo")
        fields = grpo_fields()
        if key not in fields:
            hint = suggestion(key, fields, otherwise="see TRL's GRPOConfig for its fields")
            raise UserError(f"--grpo {key!r} is not a field of the installed GRPOConfig; {hint}")
        if key in OWNED_FIELDS:
            raise UserError(f"--grpo {key} is set by {OWNED_FIELDS[key]}")
        if key in overrides:
            raise UserError(f"--grpo {key} is repeated")
        overrides[key] = _value(key, text, fields[key])
    return overrides


def _value(key: str, text: str, annotation: str) -> Any:
    """Parse one value, and check its type if the field's annotation consists of plain types."""
    import yaml

    types = {name.strip(" \"'").replace("None", "NoneType") for name in annotation.split("|")}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--grpo {key}={text} cannot be read: {str(error).splitlines()[0]}") from None
    if types <= {"str", "NoneType"} and value is not None and not isinstance(value, str):
        value = text.strip()  # run_name=2026-11-21 is a name, not a date
    if isinstance(value, str) and types & {"float", "int"}:
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 parses 1e-5 as a string
    accepted = types | {"int"} if "float" in types else types
    if types <= {"int", "float", "bool", "str", "NoneType"} and type(value).__name__ not in accepted:
        raise UserError(f"--grpo {key}={text} is {type(value).__name__}; GRPOConfig expects {annotation}")
    if key in CHOICES and value not in CHOICES[key]:
        raise UserError(f"--grpo {key}={text} is unknown to TRL; expected one of {', '.join(CHOICES[key])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--grpo {key}={text} is not a finite number")
    least = 1 if key == "num_iterations" else 0
    if isinstance(value, (int, float)) and key not in _SIGNED_FIELDS and value < least:
        raise UserError(f"--grpo {key}={text} is too small; expected {least} or more")
    return value
