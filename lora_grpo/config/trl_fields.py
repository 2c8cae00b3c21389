"""Parses `--grpo KEY=VALUE` for any field of TRL's GRPOConfig, checked against the installed source without import.

Importing TRL takes seconds and loads torch, so field names and annotations are parsed from three source files. Unknown
keys are rejected here, because Unsloth's patched GRPOConfig only warns about them and drops them.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError

_PUSH = "nothing here: scripts/push.py uploads the finished adapter"

OWNED_FIELDS: dict[str, str] = {
    "output_dir": "--output-dir",
    "resume_from_checkpoint": "--resume",
    "seed": "--seed",
    "data_seed": "--seed",
    "max_steps": "--train.max-steps",
    "num_train_epochs": "--train.max-steps",
    "per_device_train_batch_size": "--train.micro-batch-size",
    "gradient_accumulation_steps": "--train.prompts-per-step",
    "steps_per_generation": "--train.prompts-per-step",
    "generation_batch_size": "--train.prompts-per-step",
    "num_generations": "--sampling.num-generations",
    "max_completion_length": "--sampling.max-completion-tokens",
    "temperature": "--sampling.temperature",
    "top_p": "--sampling.top-p",
    "learning_rate": "--train.learning-rate",
    "lr_scheduler_type": "--train.lr-scheduler",
    "warmup_steps": "--train.warmup-steps",
    "beta": "--train.beta",
    "max_grad_norm": "--train.max-grad-norm",
    "optim": "--train.optimizer",
    "gradient_checkpointing": "--train.gradient-checkpointing",
    "save_steps": "--train.checkpoint-steps",
    "save_total_limit": "--train.keep-checkpoints",
    "report_to": "--train.report-to",
    "reward_weights": "--rewards",
    "save_strategy": "--train.checkpoint-steps",
    "save_only_model": "--train.checkpoint-steps",
    "use_vllm": "--sampling.backend",
    "vllm_mode": "--sampling.backend",
    "vllm_model_impl": "--sampling.backend",
    "vllm_server_base_url": "--sampling.server-url",
    "vllm_server_host": "--sampling.server-url",
    "vllm_server_port": "--sampling.server-url",
    "vllm_server_timeout": "--sampling.server-url",
    "vllm_group_port": "--sampling.server-url",
    "vllm_gpu_memory_utilization": "--model.gpu-memory-share",
    "vllm_max_model_length": "--model.max-sequence-tokens",
    "vllm_enable_sleep_mode": "the kit, which lets vLLM sleep during training",
    "vllm_tensor_parallel_size": "nothing here: each process runs its own vLLM",
    "vllm_structured_outputs_regex": "nothing here: the kit's samplers do not constrain completions",
    "logging_strategy": "metrics.jsonl, which logs every step",
    "logging_steps": "metrics.jsonl, which logs every step",
    "shuffle_dataset": "--seed, which fixes the order of prompts",
    "remove_unused_columns": "the kit, whose rewards read the columns",
    "push_to_hub": _PUSH,
    "hub_token": f"{_PUSH}; a token is never an argument",
    "hub_model_id": _PUSH,
    "hub_strategy": _PUSH,
    "hub_private_repo": _PUSH,
    "hub_always_push": _PUSH,
    "hub_revision": _PUSH,
}
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
}
"""Allowed values of fields that TRL 1.14 checks only after sampling the first step."""

UNREAD_FIELDS = {"top_k", "min_p", "repetition_penalty", "generation_kwargs", "cache_implementation"}
UNREAD_FIELDS |= {"chat_template_kwargs", "use_transformers_continuous_batching"}
"""Fields that TRL's generation uses and the kit's samplers ignore."""


@functools.cache
def grpo_fields() -> dict[str, str]:
    """Return every field of the installed GRPOConfig, with its annotation as text.

    Raises:
        UserError: trl or transformers is not installed.
    """
    fields: dict[str, str] = {}
    for package, relative, class_name in _SOURCES:
        for statement in _class_body(package, relative, class_name):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = ast.unparse(statement.annotation)
    return fields


def check_name(flag: str, name: str, relative: str, class_name: str) -> None:
    """Check that a name is in an enumeration of the installed transformers.

    Args:
        flag: the flag that sets the name.
        name: the name, e.g. `cosine`.
        relative: the source file within transformers, e.g. `trainer_utils.py`.
        class_name: the enumeration, e.g. `SchedulerType`.

    Raises:
        UserError: the name is unknown; suggests the closest match.
    """
    known = [
        str(statement.value.value)
        for statement in _class_body("transformers", relative, class_name)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    ]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        raise UserError(f"{flag} {name!r} is unknown to the installed transformers; {hint}")


@functools.cache
def _class_body(package: str, relative: str, class_name: str) -> list[ast.stmt]:
    """Return the statements of a class in an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"{package} is not installed; run `pip install -e .` in the project's folder")
    tree = ast.parse((Path(spec.origin).parent / relative).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node.body
    raise UserError(f"the installed {package} has no {class_name} in {relative}; install the pinned version")


def parse_grpo_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Convert `["loss_type=dr_grpo", "epsilon_high=0.28"]` to keyword arguments of GRPOConfig.

    Args:
        items: KEY=VALUE strings; the value is YAML (number, true/false, null, list, mapping or text).

    Raises:
        UserError: a missing `=`, an unknown key, a key that another flag sets, a repeated key, or an invalid value.
    """
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"--grpo {item!r} is not KEY=VALUE, e.g. --grpo epsilon_high=0.28")
        fields = grpo_fields()
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see TRL's GRPOConfig for its fields"
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

    types = {name.strip(" \"'") for name in annotation.split("|")}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--grpo {key}={text} cannot be read: {str(error).splitlines()[0]}") from None
    if types <= {"str", "None"} and value is not None and not isinstance(value, str):
        value = text.strip()  # run_name=2026-11-21 is a name, not a date
    if isinstance(value, str) and types & {"float", "int"}:
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 parses 1e-5 as a string
    is_plain = types <= {"int", "float", "bool", "str", "None"}
    accepted = types | ({"int"} if "float" in types else set()) | ({"NoneType"} if "None" in types else set())
    if is_plain and type(value).__name__ not in accepted:
        raise UserError(f"--grpo {key}={text} is {type(value).__name__}; GRPOConfig expects {annotation}")
    if key in CHOICES and value not in CHOICES[key]:
        raise UserError(f"--grpo {key}={text} is unknown to TRL; expected one of {', '.join(CHOICES[key])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--grpo {key}={text} is not a finite number")
    return value
