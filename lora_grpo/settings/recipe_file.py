"""The recipes that Python code names: the presets of a recipe file, and the recipe of a task."""

from pathlib import Path
from typing import Literal

from lora_grpo.commands import RECIPES, recipe_file
from lora_grpo.errors import UserError, suggestion
from lora_grpo.files import python_file
from lora_grpo.settings.layers import Recipe
from lora_grpo.tasks import CODE_TASKS, MATH_TASKS

_EXPECTED = "a recipe: a file with PRESETS"


def recipe_of_task(task: str | None, method: Literal["grpo", "sft"]) -> str:
    """Return the name of the recipe that trains on a task."""
    if method == "sft":
        return "sft"
    if task in (None, "gsm8k", "starter"):
        return "gsm8k"
    if task in CODE_TASKS:
        return "code"
    if task in MATH_TASKS:
        return "math"
    return "task"


def read_recipe(name: str) -> Recipe:
    """Return a recipe by its name in `lora-grpo train NAME`, or by its file.

    Its method is the `METHOD` of the file, by default `grpo`.

    Raises:
        UserError: there is no such recipe, or the file defines no presets.
    """
    if name in RECIPES:
        path = recipe_file(name)
    elif name.endswith(".py"):
        path = Path(name).expanduser()
    else:
        raise UserError(f"unknown recipe {name!r}; {suggestion(name, [*RECIPES, 'my_recipe.py'])}")
    module = python_file.load(path, _EXPECTED)
    presets = getattr(module, "PRESETS", None)
    if not isinstance(presets, dict) or not presets:
        raise UserError(f"{path} defines no PRESETS; expected {_EXPECTED}")
    return Recipe(path.stem, presets, getattr(module, "METHOD", "grpo"))
