"""Merges the layers of settings: preset, then the resumed run, then a settings file, then what is given."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from lora_grpo import console
from lora_grpo.commands import command, recipe_file
from lora_grpo.config import UNUSED_BY_SFT, ConfigChanges, Invocation, RunConfig, check_fields, endless_steps, replace
from lora_grpo.errors import UserError
from lora_grpo.flags import flag
from lora_grpo.hardware import choose_preset
from lora_grpo.models import find_teacher, model_files, with_start
from lora_grpo.rewards import beside
from lora_grpo.runs import check_resume, flatten, planned_settings, resumes
from lora_grpo.settings.checks import check, check_has_vllm
from lora_grpo.settings.user_code import refuse_unnamed_code
from lora_grpo.tasks import TaskFile, get_task, has_conversations, is_users_task, task_title


@dataclass(frozen=True)
class Recipe:
    """What a recipe file defines."""

    name: str
    """Such as `gsm8k_lora`. The default output folder is `outputs/<name>`."""
    presets: Mapping[str, ConfigChanges]
    """Changes to the defaults, by the name of the preset."""
    method: Literal["grpo", "sft"] = "grpo"

    @property
    def defaults(self) -> RunConfig:
        """The settings below the preset."""
        return RunConfig(method=self.method, output_dir=f"outputs/{self.name}")


def settle(
    given: Mapping[str, Any], invocation: Invocation, recipe: Recipe, settings_file: str | None = None
) -> RunConfig:
    """Merge the given settings with those of lower layers, and check the result.

    Args:
        given: settings by section, as text or as values: `{"train": {"max_steps": "60"}}`.
        settings_file: path of a YAML or JSON file, or of a run.json.

    Raises:
        UserError: an unknown or wrong setting, or settings that do not fit each other or this machine.
    """
    given = _with_recipe_beside(given)
    _check_invocation(invocation, recipe.defaults.processes)
    task = given.get("data", {}).get("task")
    base = recipe.defaults
    if recipe.name == "your_task" and task:  # runs of different tasks have different folders
        base = replace(base, {"output_dir": f"outputs/{task_title(task).rpartition(':')[2]}"})

    # The layers below: a preset, the run that is resumed, a settings file.
    layers: dict[str, dict[str, Any]] = {}
    output_dir = base.output_dir
    if settings_file:
        settings = _read_settings(Path(settings_file))
        if recipe.method == "grpo" and settings.get("method") == "sft":
            raise UserError(
                f"--config {settings_file} has `method: sft`, and this recipe trains with GRPO; leave it out, or run "
                f"{command('train sft')}"
            )
        layers[f"--config {settings_file}"] = settings
        output_dir = settings.get("output_dir") or output_dir
    folder = Path(str(given.get("output_dir") or output_dir)).expanduser()
    record = folder / "run.json"
    is_resumed = resumes(folder, invocation)
    if is_resumed:
        layers = {str(record): _read_settings(record, recipe.name), **layers}
    requested = "auto"
    for layer in layers.values():
        requested = layer.get("preset", requested)
    requested = given.get("preset") or requested
    planning = invocation.plan or invocation.audit or invocation.dry_run
    preset, reason = choose_preset(requested, recipe.presets, planning=planning)
    if recipe.method == "sft":
        _drop_unused(given, invocation, list(layers.values()))
    defaults = _with_defaults_of_task(replace(base, recipe.presets[preset]), preset, task)

    # Merge them.
    config = defaults
    for name, layer in layers.items():
        try:
            config = check_fields(replace(config, {**layer, "method": recipe.method}))
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    config = check_fields(replace(replace(config, given), {"preset": preset, "output_dir": str(folder)}))
    if invocation.resume:
        check_resume(folder)

    # Resolve settings that depend on others, and check all of them.
    config = _settle_task(config)
    # A step limit that is given was set together with `hours`, from whatever layer these are; so was that of a run that
    # is resumed.
    with_hours = [{**given, "hours": config.hours}]
    if is_resumed:
        begun = layers[str(record)]
        with_hours.append({**begun, "hours": begun.get("hours") or config.hours})
    config = _settle_steps(config, [*layers.values(), *with_hours])
    if layers:
        refuse_unnamed_code(config, replace(defaults, given), " and ".join(layers))
    config = with_start(config, given.get("lora", {}), resumed=is_resumed)
    find_teacher(config, resumed=is_resumed)  # raises UserError if the model cannot learn from it
    check(config)
    _check_used(given, config)
    if not is_resumed:
        check_has_vllm(config)
    if not (invocation.plan or invocation.audit):  # a plan and an audit need no weights
        model_files.check_folder(config.model.name, "--model.name")
    console.note(f"{reason}; task {task_title(config.data.task)}, model {config.model.name}")
    return config


def changed_settings(
    config: RunConfig, presets: Mapping[str, ConfigChanges], begun: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the preset's value of each setting that the user, a settings file or a start adapter changed.

    Args:
        begun: run.json of the run that is resumed. Its settings include what the plan or `check-gpu` chose, so only
            those count that it calls changed, or that differ now.
    """
    preset = replace(RunConfig(method=config.method), presets[config.preset])
    preset = _with_defaults_of_task(preset, config.preset, config.data.task)
    values = flatten(config.to_dict())
    not_compared = {"preset", "output_dir"}
    if config.step_limit is None:
        not_compared.add("train.max_steps")
    changed = {
        name: value
        for name, value in flatten(check_fields(preset).to_dict()).items()
        if name not in not_compared and value != values[name]
    }
    changed_before = begun.get("changed_settings") if begun else None
    if begun is None or changed_before is None:
        return changed
    values_before = flatten(begun["config"])
    return {
        name: value
        for name, value in changed.items()
        if name in changed_before or values[name] != values_before.get(name)
    }


def _with_recipe_beside(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with a task such as `recipes/x.py`, as `lora-grpo tasks` prints it, found from any folder."""
    task = Path(given.get("data", {}).get("task") or "")
    if task.parent == Path("recipes") and not task.exists():
        path = recipe_file("task").with_name(task.name)
        return {**given, "data": {**given["data"], "task": str(path)}}
    return given


def _check_invocation(invocation: Invocation, processes: int) -> None:
    """Raise UserError for actions that exclude each other."""
    actions = [flag(name) for name, is_given in dataclasses.asdict(invocation).items() if is_given]
    if invocation.resume and invocation.overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; pass one of them")
    if (invocation.preview or invocation.audit) and (len(actions) > 1 or processes > 1):
        raise UserError(f"{' and '.join(actions)} cannot be combined; pass one, in one process")
    if invocation.plan and invocation.dry_run:
        raise UserError("--dry-run and --plan cannot be combined; pass one")


def _with_defaults_of_task(config: RunConfig, preset: str, task: str | None = None) -> RunConfig:
    """Return a configuration with the defaults of its task file, or of `task`; unchanged for built-in tasks.

    In GRPO, the defaults are the `REWARDS` of the file. In SFT, they are the model and the limits of the file's preset,
    with which GRPO continues, a micro-batch size that divides those of SFT and of GRPO, and the file's `SFT_PRESETS`.
    """
    task = task or config.data.task
    if not is_users_task(task):
        return config
    file = cast(TaskFile, get_task(task))
    if config.method == "grpo":
        return replace(config, {"rewards": beside(file.constants.REWARDS, Path(task).parent)})
    grpo_preset = getattr(file.module, "PRESETS", {}).get(preset)
    if grpo_preset is not None:
        of_grpo = replace(RunConfig(), grpo_preset)
        config = dataclasses.replace(config, model=of_grpo.model, sampling=of_grpo.sampling)
        sizes = (of_grpo.train.micro_batch_size, config.train.micro_batch_size)
        common_size = math.gcd(*(size for size in sizes if size)) or None  # the divisor of no sizes is 0
        config = replace(config, {"train": {"micro_batch_size": common_size}})
    sft_presets = getattr(file.module, "SFT_PRESETS", {})
    return replace(config, sft_presets.get(preset, {}))


def _drop_unused(given: Mapping[str, Any], invocation: Invocation, layers: Sequence[dict[str, Any]]) -> None:
    """Reject settings without effect on SFT. In a file they are dropped, because it may be from a GRPO run."""
    useless = [flag(name) for name in UNUSED_BY_SFT if name in flatten(dict(given))]
    if invocation.preview:
        useless.append("--preview")
    if useless:
        raise UserError(f"{useless[0]} is for GRPO, and this recipe trains on reference answers; leave it out")
    for layer in layers:
        _drop(layer, UNUSED_BY_SFT)


def _check_used(given: Mapping[str, Any], config: RunConfig) -> None:
    """Raise UserError for a given setting that no task of the run reads. A preset or a file may have it."""
    tasks = (config.data.task, config.data.evaluation_task, *config.eval.also)
    names = ", ".join(dict.fromkeys(map(task_title, tasks)))
    if given.get("sampling", {}).get("max_turn_tokens") and not has_conversations(config):
        raise UserError(
            f"--sampling.max-turn-tokens limits the turns of conversations, and there are none in {names}; pass "
            "--sampling.max-completion-tokens, or leave it out"
        )
    if given.get("data", {}).get("prompt_style") and all(get_task(task).has_own_prompts for task in tasks):
        raise UserError(f"--data.prompt-style has no effect on the prompts of {names}; leave it out")


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
        layers: the settings of files and those that are given, as they were written.
    """
    if config.hours is None:
        return config
    for layer in layers:
        hours = layer.get("hours")
        limit = layer.get("train", {}).get("max_steps")
        if hours and limit and limit != endless_steps(float(hours)):
            return config
    return replace(config, {"train": {"max_steps": endless_steps(config.hours)}})


def _read_settings(path: Path, recipe: str | None = None) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. For a run.json, omit the settings that were planned for its GPU.

    A run that is resumed keeps the bits of its base.

    Args:
        recipe: the recipe with which the run is resumed. It must be the one that began the run.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            settings = json.loads(text)
        else:
            settings = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason: str | None = " ".join(str(error).split())
        if isinstance(error, OSError):
            reason = error.strerror
        raise UserError(f"--config {path} cannot be read: {reason}") from None
    if isinstance(settings, dict) and "lora_grpo_run" in settings and isinstance(settings.get("config"), dict):
        if recipe and settings.get("recipe", recipe) != recipe:
            raise UserError(
                f"the run in {path.parent} is one of the recipe {settings['recipe']!r}, not of {recipe!r}; resume it "
                "with that recipe, or pass another --output-dir"
            )
        planned = planned_settings(settings)
        if recipe:
            planned = [name for name in planned if name != "model.bits"]
        settings = settings["config"]
        _drop(settings, [*planned, "method"])  # the method is that of the recipe
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} contains {type(settings).__name__}; expected e.g. `train: {{max_steps: 60}}`")
    return settings


def _drop(settings: dict[str, Any], names: Sequence[str]) -> None:
    """Remove settings by their dotted names."""
    for name in names:
        section, _, key = name.rpartition(".")
        values: Any = settings
        if section:
            values = settings.get(section)
        if isinstance(values, dict):
            values.pop(key, None)
