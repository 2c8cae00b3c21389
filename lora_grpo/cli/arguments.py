"""The command line of a recipe: preset, then `--config` file, then flags; later ones override earlier ones."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from lora_grpo import distributed
from lora_grpo.cli.validate import check, refuse_unnamed_code
from lora_grpo.commands import recipe_file
from lora_grpo.config import UNUSED_BY_SFT, ConfigChanges, Invocation, RunConfig, check_fields, endless_steps, replace
from lora_grpo.errors import UserError
from lora_grpo.flags import flag, read_given
from lora_grpo.hardware import choose_preset
from lora_grpo.models import check_model, with_start
from lora_grpo.rewards import beside
from lora_grpo.runs import check_resume, flatten
from lora_grpo.tasks import TaskFile, get_task, is_task_file, task_title

_MAIN_FLAGS = (
    *("preset", "output_dir", "seed", "hours", "rewards", "model.name", "data.task", "data.train", "data.eval"),
    *("lora.from", "train.max_steps", "train.learning_rate"),
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
    base = RunConfig(method=method, output_dir=f"outputs/{recipe}")
    if {"-h", "--help", "--help-all"} & set(arguments):
        _show_help(base, arguments, description, presets)
    given = read_given(_Flags, arguments)
    how = Invocation(**{field.name: given.pop(field.name, False) for field in dataclasses.fields(Invocation)})
    task = Path(given.get("data", {}).get("task") or "")
    if task.parent == Path("recipes") and not task.exists():  # as `lora-grpo tasks` prints it, in another folder
        given["data"]["task"] = str(recipe_file("task").with_name(task.name))
    if recipe == "your_task" and task.stem:  # runs of different tasks have different folders
        base = replace(base, {"output_dir": f"outputs/{task.stem.rpartition(':')[2]}"})
    actions = [flag(name) for name, is_given in dataclasses.asdict(how).items() if is_given]
    if how.resume and how.overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; pass one of them")
    if (how.preview or how.audit) and (len(actions) > 1 or distributed.world_size() > 1):
        raise UserError(f"{' and '.join(actions)} cannot be combined; pass one, in one process")

    # The layers below the flags: a preset, the run that is resumed, a settings file.
    path = given.pop("config", None)
    files = [(f"--config {path}", _read_settings(Path(path)))] if path else []
    in_file = files[0][1].get("output_dir") if files else None
    folder = Path(str(given.get("output_dir") or in_file or base.output_dir)).expanduser()
    is_resumed = how.resume and (folder / "run.json").is_file()
    if is_resumed:
        files.insert(0, (str(folder / "run.json"), _read_settings(folder / "run.json", recipe)))
    requested = given.get("preset") or next((file["preset"] for _, file in reversed(files) if "preset" in file), "auto")
    preset, reason = choose_preset(requested, presets, planning=how.plan or how.audit or how.dry_run)
    defaults = replace(base, presets[preset])
    if method == "sft":
        _drop_unused(given, how, [file for _, file in files])
    defaults = _with_defaults_of_task(defaults, preset, given.get("data", {}).get("task"))

    # Merge them.
    config = defaults
    for path, layer in files:
        try:
            config = check_fields(replace(config, {**layer, "method": method}))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    config = check_fields(replace(replace(config, given), {"preset": preset, "output_dir": str(folder)}))
    if how.resume:
        check_resume(folder)

    # Resolve settings that depend on others, and check all of them.
    config = _settle_steps(_settle_task(config), [*(file for _, file in files), given | {"hours": config.hours}])
    if files:
        refuse_unnamed_code(config, replace(defaults, given), " and ".join(path for path, _ in files))
    config = with_start(config, given.get("lora", {}), resumed=is_resumed)
    check(config)
    if not (how.plan or how.audit):  # which need neither weights nor engines
        check_model(config)
    print(f"{reason}; task {task_title(config.data.task)}, model {config.model.name}", file=sys.stderr)
    return config, how


def changed_settings(config: RunConfig, presets: Mapping[str, ConfigChanges]) -> dict[str, Any]:
    """Return the preset's value of each setting that the command line, a settings file or a start adapter changed."""
    preset = replace(RunConfig(method=config.method), presets[config.preset])
    preset = _with_defaults_of_task(preset, config.preset, config.data.task)
    values, names = flatten(config.to_dict()), {"preset", "output_dir"}
    if config.step_limit is None:
        names.add("train.max_steps")
    return {
        name: value
        for name, value in flatten(check_fields(preset).to_dict()).items()
        if name not in names and value != values[name]
    }


def _with_defaults_of_task(config: RunConfig, preset: str, task: str | None = None) -> RunConfig:
    """Return a configuration with the defaults of its task file, or of `task`; unchanged for built-in tasks.

    These are its `REWARDS`; in SFT, the model and limits that GRPO continues with, and micro-batches that fit both.
    """
    task = task or config.data.task
    if not is_task_file(task):
        return config
    file = cast(TaskFile, get_task(task))
    if config.method == "grpo":
        return replace(config, {"rewards": beside(file.constants.REWARDS, Path(task).parent)})
    own = getattr(file.module, "PRESETS", {}).get(preset, {})
    limits = {name: own[name] for name in ("model", "sampling") if name in own}
    size = math.gcd(own.get("train", {}).get("micro_batch_size") or 0, config.train.micro_batch_size or 0) or None
    return replace(config, {**limits, "train": {"micro_batch_size": size}})


def _show_help(
    base: RunConfig, arguments: Sequence[str], description: str, presets: Mapping[str, ConfigChanges]
) -> None:
    """Print the help, with the values of a preset as defaults, and exit."""
    asked = re.search(r"(?<=--preset[= ])\S+", " ".join(arguments))
    preset = asked[0] if asked and asked[0] in presets else next(iter(presets))
    about = f"{description}\nPresets: auto, {', '.join(presets)}. "
    about += f"The defaults shown are those of `{preset}`. --help-all lists every setting."
    config = replace(base, presets[preset])
    defaults = _Flags(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

    def shown(name: str) -> bool:
        used = base.method != "sft" or name not in UNUSED_BY_SFT
        return used and ("--help-all" in arguments or name in _MAIN_FLAGS)

    read_given(_Flags, ["--help"], about, defaults=defaults, shown=shown)


def _drop_unused(given: Mapping[str, Any], how: Invocation, files: Sequence[dict[str, Any]]) -> None:
    """Reject flags without effect on SFT. In a settings file they are dropped, because it may be from a GRPO run."""
    useless = [flag(name) for name in UNUSED_BY_SFT if name in flatten(dict(given))] + ["--preview"] * how.preview
    if useless:
        raise UserError(f"{useless[0]} is for GRPO, and this recipe trains on reference answers; leave it out")
    for file in files:
        _drop(file, UNUSED_BY_SFT)


def _settle_task(config: RunConfig) -> RunConfig:
    """Set the task to `gsm8k` (rows with `question` and `answer`) if files are given for `starter`, which uses none."""
    data = config.data
    if data.task not in ("starter", "starter-code") or not (data.train or data.eval):
        return config
    if data.task == "starter-code" or not (data.train and data.eval):
        raise UserError("--data.train and --data.eval need each other; pass both, or a --data.task with its own data")
    return replace(config, {"data": {"task": "gsm8k"}})


def _settle_steps(config: RunConfig, layers: Sequence[Mapping[str, Any]]) -> RunConfig:
    """With `hours`, remove a step limit that was not set together with it, such as that of the preset.

    Args:
        layers: the settings of files and flags, as they were written.
    """
    if config.hours is None:
        return config
    for layer in layers:
        hours, limit = layer.get("hours"), layer.get("train", {}).get("max_steps")
        if hours and limit and limit != endless_steps(float(hours)):
            return config
    return replace(config, {"train": {"max_steps": endless_steps(config.hours)}})


def _read_settings(path: Path, recipe: str | None = None) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. For a run.json, omit the settings that were planned for its GPU.

    Args:
        recipe: the recipe that resumes the run, which must be its own.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"--config {path} cannot be read: {reason}") from None
    if isinstance(settings, dict) and "lora_grpo_run" in settings and isinstance(settings.get("config"), dict):
        if recipe and settings.get("recipe", recipe) != recipe:
            raise UserError(
                f"the run in {path.parent} is one of the recipe {settings['recipe']!r}, not of {recipe!r}; resume it "
                "with that recipe, or pass another --output-dir"
            )
        _drop(settings["config"], (settings.get("memory") or {}).get("derived", []))
        settings = settings["config"]
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} contains {type(settings).__name__}; expected e.g. `train: {{max_steps: 60}}`")
    return settings


def _drop(settings: dict[str, Any], names: Sequence[str]) -> None:
    """Remove settings by their dotted names."""
    for name in names:
        section, _, key = name.rpartition(".")
        values = settings.get(section) if section else settings
        if isinstance(values, dict):
            values.pop(key, None)
