"""The starter tasks: bundled word problems, graded like GSM8K, and bundled functions, graded with unit tests."""

from __future__ import annotations

from types import SimpleNamespace

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.tasks import code_grading, gsm8k
from lora_grpo.tasks.registry import Row


def read(name: str) -> SimpleNamespace:
    """Return the task "starter" or "starter-code"."""

    def load(split: str, source: str | None = None) -> list[Row]:
        if source is not None:
            raise UserError(f"the {name} task uses its bundled problems, got source {source!r}; remove the source")
        return starter.problems(name, split)

    if name == "starter":
        return SimpleNamespace(load=load, check=gsm8k.check, gold=gsm8k.gold)
    graded = code_grading
    return SimpleNamespace(load=load, check=graded.check, check_many=graded.check_many, gold=graded.gold)
