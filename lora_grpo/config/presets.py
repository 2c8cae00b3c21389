"""Defaults shared by the presets of all recipes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.config.schema import ConfigChanges

_GPU: ConfigChanges = {
    "model": {"max_sequence_tokens": 1024},
    "lora": {"rank": 32, "alpha": 64},
    "sampling": {"num_generations": 8, "max_completion_tokens": 512},
    "train": {"prompts_per_step": 8, "learning_rate": 2e-5, "optimizer": "adamw_8bit"},
}
"""One GPU: LoRA on all linear layers, 8-bit AdamW, 64 completions of up to 512 tokens per step."""

_CPU_TRAINING = {"prompts_per_step": 8, "lr_scheduler": "constant", "warmup_steps": 0, "max_grad_norm": 1.0}

_STARTER: ConfigChanges = {
    "sampling": {"num_generations": 16, "max_completion_tokens": 64},
    "train": {**_CPU_TRAINING, "max_steps": 60, "micro_batch_size": 32, "learning_rate": 5e-4},
}
"""The bundled model on a CPU: 128 short completions per step, and a learning rate for a 2-million-parameter model."""

LAPTOP_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model of `laptop` presets on the Hub."""
LAPTOP_FOLDER = "models/SmolLM2-135M-Instruct"
"""The folder that `make laptop-model` writes it to."""

_LAPTOP: ConfigChanges = {
    "model": {"max_sequence_tokens": 128},
    "sampling": {"num_generations": 8, "max_completion_tokens": 40},
    "train": {**_CPU_TRAINING, "micro_batch_size": 16, "learning_rate": 3e-4},
    "monitor": {"rows": 0},
    "eval": {"num_samples": 2, "k": (1,)},
}
"""A language model with 135 million parameters on a CPU: 64 short completions per step, and short evaluations."""


def gpu_preset(name: str, /, **changes: Any) -> ConfigChanges:
    """Return the GPU defaults for a model, with changes by section: `gpu_preset("org/model", lora={"rank": 8})`."""
    return _merge(_merge(_GPU, {"model": {"name": name}}), changes)


def starter_preset(**changes: Any) -> ConfigChanges:
    """Return the defaults of the bundled model, with changes by section."""
    return _merge(_STARTER, changes)


def laptop_preset(**changes: Any) -> ConfigChanges:
    """Return the defaults of SmolLM2-135M on a CPU, with changes by section. It is read from LAPTOP_FOLDER if there."""
    is_downloaded = (Path(LAPTOP_FOLDER) / "config.json").is_file()
    name = LAPTOP_FOLDER if is_downloaded else LAPTOP_MODEL
    return _merge(_merge(_LAPTOP, {"model": {"name": name}}), changes)


def _merge(base: ConfigChanges, changes: ConfigChanges) -> ConfigChanges:
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            value = _merge(base.get(key, {}), value)
        merged[key] = value
    return merged
