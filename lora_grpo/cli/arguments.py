"""The command line of a recipe: its help, and its flags as settings."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lora_grpo.config import UNUSED_BY_SFT, ConfigChanges, Invocation, RunConfig, replace
from lora_grpo.flags import read_given
from lora_grpo.settings import Recipe, settle

_MAIN_FLAGS = (
    *("preset", "output_dir", "seed", "hours", "rewards", "model.name", "data.task", "data.train", "data.eval"),
    *("lora.from", "teacher.name", "train.max_steps", "train.learning_rate"),
    *("sampling.num_generations", "sampling.max_completion_tokens"),
    *("config", *(field.name for field in dataclasses.fields(Invocation))),
)
"""The settings that `--help` lists; `--help-all` lists all settings."""


@dataclass(frozen=True)
class _Flags(Invocation, RunConfig):
    config: str | None = None
    """YAML or JSON file with settings, or the run.json of another run. Flags override it."""


def parse(
    arguments: Sequence[str],
    *,
    recipe: str,
    description: str,
    presets: Mapping[str, ConfigChanges],
    method: Literal["grpo", "sft"] = "grpo",
) -> tuple[RunConfig, Invocation]:
    """Read the command line of a recipe and return a checked configuration.

    See `pipeline.run_recipe` for the arguments. `--help` exits.

    Raises:
        UserError: an error in the arguments or in a settings file.
    """
    definition = Recipe(recipe, presets, method)
    if {"-h", "--help", "--help-all"} & set(arguments):
        _show_help(definition, arguments, description)
    given = read_given(_Flags, arguments)
    actions = {field.name: given.pop(field.name, False) for field in dataclasses.fields(Invocation)}
    invocation = Invocation(**actions)
    settings_file = given.pop("config", None)
    return settle(given, invocation, definition, settings_file), invocation


def _show_help(recipe: Recipe, arguments: Sequence[str], description: str) -> None:
    """Print the help, with the values of a preset as defaults, and exit."""
    requested = re.search(r"(?<=--preset[= ])\S+", " ".join(arguments))
    preset = next(iter(recipe.presets))
    if requested and requested[0] in recipe.presets:
        preset = requested[0]
    text = f"{description}\nPresets: auto, {', '.join(recipe.presets)}. "
    text += f"The defaults shown are those of `{preset}`. --help-all lists every setting."
    config = replace(recipe.defaults, recipe.presets[preset])
    defaults = _Flags(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

    def is_shown(name: str) -> bool:
        if recipe.method == "sft" and name in UNUSED_BY_SFT:
            return False
        return "--help-all" in arguments or name in _MAIN_FLAGS

    read_given(_Flags, ["--help"], text, defaults=defaults, shown=is_shown)
