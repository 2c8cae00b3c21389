"""`--grpo KEY=VALUE`: every field of TRL's GRPOConfig, checked against the installed source without importing it.

Importing TRL takes seconds and loads torch; its field names and annotations stand in three source files, which `ast`
reads in milliseconds. Unsloth's patched GRPOConfig drops unknown keys with a warning, so the check has to be ours.
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
    "vllm_enable_sleep_mode": "the kit, whose vLLM sleeps while it trains",
    "vllm_tensor_parallel_size": "nothing here: each process has a vLLM of its own",
    "vllm_structured_outputs_regex": "nothing here: the kit's samplers do not constrain what is drawn",
    "logging_strategy": "metrics.jsonl, which has every step",
    "logging_steps": "metrics.jsonl, which has every step",
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
"""GRPOConfig field -> where the kit sets it. Two ways to set one thing would disagree one day."""

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
"""Text fields whose values TRL 1.14 looks at only when the first step is already sampled."""

UNREAD_FIELDS = {"top_k", "min_p", "repetition_penalty", "generation_kwargs", "cache_implementation"}
UNREAD_FIELDS |= {"chat_template_kwargs", "use_transformers_continuous_batching"}
"""Fields that TRL's own generation reads and the kit's sampler does not."""

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}


@functools.cache
def grpo_fields() -> dict[str, str]:
    """Return every field of the installed GRPOConfig and its annotation as written.

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
    """Refuse a name that an enumeration of the installed transformers does not have.

    Args:
        flag: the flag that gave the name.
        name: what it gave, e.g. `cosine`.
        relative: the source file within transformers, e.g. `trainer_utils.py`.
        class_name: the enumeration, e.g. `SchedulerType`.

    Raises:
        UserError: no such name; the nearest one is offered.
    """
    known = [
        str(statement.value.value)
        for statement in _class_body("transformers", relative, class_name)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    ]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        raise UserError(f"{flag} {name!r} is not known to the installed transformers; {hint}")


@functools.cache
def _class_body(package: str, relative: str, class_name: str) -> list[ast.stmt]:
    """Return the statements of a class in an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"{package} is not installed; run `pip install -e .` in the project's folder")
    tree = ast.parse((Path(spec.origin).parent / relative).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node.body
    raise UserError(f"the installed {package} has no {class_name} in {relative}; install the pinned version")


def parse_grpo_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Turn `["loss_type=dr_grpo", "epsilon_high=0.28"]` into keyword arguments of GRPOConfig.

    Args:
        items: KEY=VALUE strings; the value is read as YAML (numbers, true/false, null, lists, mappings, else text).

    Raises:
        UserError: no `=`, an unknown key (the nearest one is offered), a key the kit sets elsewhere, or a wrong type.
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
            raise UserError(f"--grpo {key} is given twice")
        overrides[key] = _value(key, text, fields[key])
    return overrides


def _value(key: str, text: str, annotation: str) -> Any:
    """Read one value and hold it against the field's annotation where that is made of plain types."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--grpo {key}={text} cannot be read: {str(error).splitlines()[0]}") from None
    names = [name.strip() for name in annotation.replace('"', "").replace("'", "").split("|")]
    if set(names) <= {"str", "None"} and value is not None:
        value = value if isinstance(value, str) else text.strip()  # run_name=2026-11-21 is a name, not a date
    if isinstance(value, str) and any(name in ("float", "int") for name in names):
        # YAML 1.1 reads 1e-5 as text; people write it for a number.
        with contextlib.suppress(ValueError):
            value = float(value)
    if all(name in _TYPES or name == "None" for name in names):
        accepted = tuple(kind for name in names for kind in _TYPES.get(name, (type(None),)))
        wrong_bool = isinstance(value, bool) and "bool" not in names
        if not isinstance(value, accepted) or wrong_bool:
            raise UserError(f"--grpo {key}={text} is {type(value).__name__}; GRPOConfig expects {annotation}")
    if key in CHOICES and value not in CHOICES[key]:
        near = difflib.get_close_matches(str(value), CHOICES[key], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(CHOICES[key])}"
        raise UserError(f"--grpo {key}={text} is not known to TRL; {hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--grpo {key}={text} is not a finite number")
    return value
