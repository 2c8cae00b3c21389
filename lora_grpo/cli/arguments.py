"""The command line of a recipe: preset, then `--config` file, then flags; later ones override earlier ones."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import tyro

from lora_grpo import commands, distributed
from lora_grpo.cli.flags import join_help_lines, read_flags
from lora_grpo.cli.named_code import refuse_unnamed_code
from lora_grpo.cli.validate import check
from lora_grpo.config import (
    STARTER,
    UNUSED_BY_SFT,
    Invocation,
    Overrides,
    RunConfig,
    check_fields,
    choose_preset,
    endless_steps,
    flag,
    replace,
)
from lora_grpo.errors import UserError
from lora_grpo.models import check_download, check_model, model_files, with_start
from lora_grpo.runs import check_resume, flat
from lora_grpo.tasks import TaskFile, get_task, is_task_file

_MAIN_FLAGS = (
    *("preset", "output_dir", "seed", "hours", "rewards", "model.name", "data.task", "data.train", "data.eval"),
    *("lora.from_", "train.max_steps", "train.learning_rate"),
    *("sampling.num_generations", "sampling.max_completion_tokens"),
)
"""The settings that `--help` lists; `--help-all` lists all settings."""

_UNSET = "(unset)"
"""What the first parse takes for a text that no flag sets."""


@dataclass(frozen=True)
class _Arguments:
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    invocation: Annotated[Invocation, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff] = field(
        default_factory=Invocation
    )
    config: str | None = None
    """YAML or JSON file with settings, or the run.json of another run. Flags override it."""


def parse(
    arguments: Sequence[str],
    *,
    recipe: str,
    description: str,
    presets: Mapping[str, Overrides],
    method: Literal["grpo", "sft"] = "grpo",
) -> tuple[RunConfig, Invocation]:
    """Read the command line of a recipe and return a checked configuration.

    The defaults of flags depend on other flags (`--preset`, `--config`, `--resume`), so the flags are parsed twice:
    first for the layers below them, then with the merged layers as defaults.

    See `pipeline.run_recipe` for the arguments. `--help` exits.

    Raises:
        UserError: an error in the arguments or in a settings file.
    """
    base = RunConfig(method=method, output_dir=f"outputs/{recipe}")
    unused = UNUSED_BY_SFT if method == "sft" else ()
    if {"-h", "--help", "--help-all"} & set(arguments):
        _show_help(base, arguments, description, presets, hidden=("method", *unused))

    # The layers below the flags: a preset, the run that is resumed, a settings file.
    unset = replace(base, {"preset": _UNSET, "output_dir": _UNSET, "data": {"task": _UNSET}})
    first = read_flags(_Arguments, arguments, default=_Arguments(unset))
    _check_invocation(first.invocation)
    folder, files = _read_files(first, base, recipe, unused)
    requested = next((layer["preset"] for _, layer in reversed(files) if "preset" in layer), "auto")
    requested = requested if first.run.preset == _UNSET else first.run.preset
    how = first.invocation
    preset, reason = choose_preset(requested, presets, planning=how.plan or how.audit or how.dry_run)
    defaults = replace(base, presets[preset])
    if method == "grpo":
        defaults = _with_rewards_of_task(defaults, first.run.data.task)

    # Merge them, and parse the flags over them.
    config = defaults
    for path, layer in files:
        try:
            config = check_fields(replace(config, layer))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    run = read_flags(_Arguments, arguments, default=_Arguments(config)).run
    if method == "sft":
        _refuse_unused(config, run, how)

    # Settle what depends on several settings, and check everything.
    if how.resume:
        check_resume(Path(folder))
    config = check_fields(replace(run, {"preset": preset, "output_dir": folder}))
    config = _settle_steps(_settle_task(config), arguments, [layer for _, layer in files])
    if files:
        named = read_flags(_Arguments, arguments, default=_Arguments(defaults)).run
        refuse_unnamed_code(config, named, " and ".join(path for path, _ in files))
    given = {name for name in arguments if name.startswith("--lora.")}
    config = with_start(config, given, resumed=how.resume and (Path(folder) / "run.json").is_file())
    check(config)
    if not (how.plan or how.audit):  # which need neither weights nor engines
        check_model(config)
        chose_model = requested == "auto" and config.model.name == presets[preset].get("model", {}).get("name")
        if chose_model and (problem := _why_no_weights(config, how)):
            print(f"note: {problem}; using --preset {STARTER}", file=sys.stderr)
            arguments = [*arguments, "--preset", STARTER]
            return parse(arguments, recipe=recipe, description=description, presets=presets, method=method)
    print(reason, file=sys.stderr)
    return config, how


def _read_files(
    first: _Arguments, base: RunConfig, recipe: str, unused: Collection[str]
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the folder of the run, and the settings of the run that is resumed and of `--config`, with their paths."""
    layers = [(f"--config {first.config}", _read_settings(Path(first.config)))] if first.config else []
    in_file = layers[0][1].get("output_dir") if layers else None
    given = None if first.run.output_dir == _UNSET else first.run.output_dir
    folder = str(Path(given or (in_file if isinstance(in_file, str) and in_file else base.output_dir)).expanduser())
    record = Path(folder) / "run.json"
    if first.invocation.resume and record.is_file():
        layers.insert(0, (str(record), _read_settings(record, recipe)))
    for _, layer in layers:
        _drop(layer, ["method", *unused])  # a settings file for SFT may be that of a GRPO run
    return folder, layers


def _why_no_weights(config: RunConfig, how: Invocation) -> str | None:
    """Return why the weights that a preset chose cannot be downloaded, or None if they can."""
    try:
        check_download(config.model)
    except model_files.HubUnavailable as error:
        problem = f"no weights of {config.model.name} ({error})"
        if how.overwrite:
            raise UserError(
                f"{problem}; run this again when the Hub can be reached, or pass --preset {STARTER} to replace the run "
                "by one of the bundled model"
            ) from None
        return problem
    return None


def changed_settings(config: RunConfig, presets: Mapping[str, Overrides]) -> dict[str, Any]:
    """Return the preset's value of each setting that the command line, a settings file or a start adapter changed."""
    preset = replace(RunConfig(method=config.method), presets[config.preset])
    if config.method == "grpo":
        preset = _with_rewards_of_task(preset, config.data.task)
    values, names = flat(config.to_dict()), {"preset", "output_dir"}
    if config.step_limit is None:
        names.add("train.max_steps")
    return {
        name: value
        for name, value in flat(check_fields(preset).to_dict()).items()
        if name not in names and value != values[name]
    }


def _with_rewards_of_task(config: RunConfig, task: str = _UNSET) -> RunConfig:
    """Return a configuration with the rewards that its task suggests, or `task` if it is given, if that is a file."""
    task = config.data.task if task == _UNSET else task
    if not is_task_file(task):
        return config
    return replace(config, {"rewards": cast(TaskFile, get_task(task)).rewards})


def _show_help(
    base: RunConfig,
    arguments: Sequence[str],
    description: str,
    presets: Mapping[str, Overrides],
    hidden: Collection[str],
) -> None:
    """Print the help, with the values of a preset as defaults, and exit."""
    show_all = "--help-all" in arguments
    asked = re.search(r"(?<=--preset[= ])\S+", " ".join(arguments))
    preset = asked[0] if asked and asked[0] in presets else STARTER
    about = f"{commands.described(description)}\nPresets: auto, {', '.join(presets)}. "
    about += f"The defaults shown are those of `{preset}`."
    about += "\n" if show_all else " --help-all lists every setting.\n"
    join_help_lines(_Arguments)
    config = replace(base, presets[preset])
    settings = _with_shown(config, lambda name: name not in hidden and (show_all or name in _MAIN_FLAGS))()
    run = ("run", Annotated[type(settings), tyro.conf.arg(name="")], settings)
    shown = dataclasses.make_dataclass("Arguments", [run], bases=(_Arguments,), frozen=True)
    read_flags(shown, ["--help"], prog=commands.program(), description=about)


def _with_shown(config: Any, is_shown: Callable[[str], bool], prefix: str = "") -> type:
    """Return a subclass of a configuration's class with its values as defaults; tyro shows only some flags."""
    fields: list[tuple[str, Any, Any]] = []
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            kind = _with_shown(value, is_shown, f"{prefix}{name}.")
            value = kind()
        elif not is_shown(prefix + name):
            kind = Annotated[kind, tyro.conf.Suppress]
        fields.append((name, kind, value))
    return dataclasses.make_dataclass(type(config).__name__, fields, bases=(type(config),), frozen=True)


def _refuse_unused(before: RunConfig, run: RunConfig, how: Invocation) -> None:
    """Reject flags without effect on SFT. In a settings file they are ignored, because it may be from a GRPO run."""
    old, new = flat(before.to_dict()), flat(run.to_dict())
    given = [flag(name) for name in UNUSED_BY_SFT if old[name] != new[name]] + ["--preview"] * how.preview
    if given:
        raise UserError(
            f"{given[0]} is for GRPO; this recipe trains on the task's gold solutions, without rollouts and rewards; "
            "leave it out"
        )


def _check_invocation(invocation: Invocation) -> None:
    given = [flag(name) for name, value in dataclasses.asdict(invocation).items() if value]
    if invocation.resume and invocation.overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; pass one of them")
    if (invocation.preview or invocation.audit) and len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be combined; pass one of them")
    if (invocation.preview or invocation.audit) and distributed.world_size() > 1:
        raise UserError(f"{given[0]} runs in one process, got WORLD_SIZE={distributed.world_size()}; start one process")


def _settle_task(config: RunConfig) -> RunConfig:
    """Set the task to `gsm8k` (rows with `question` and `answer`) if files are given for `starter`, which uses none."""
    data = config.data
    if data.task not in ("starter", "starter-code") or not (data.train or data.eval):
        return config
    if data.task == "starter-code":
        raise UserError("starter-code has bundled problems; pass --data.task with --data.train and --data.eval")
    if not (data.train and data.eval):
        raise UserError("--data.train and --data.eval need each other; pass both, or a --data.task with its own data")
    return replace(config, {"data": {"task": "gsm8k"}})


def _settle_steps(config: RunConfig, arguments: Sequence[str], files: Sequence[Mapping[str, Any]]) -> RunConfig:
    """With `hours`, remove a limit of steps that was not set beside it: that of the preset, or of a run without hours.

    Args:
        files: the settings in files, as they were written.
    """
    named = (argument.partition("=")[0].replace("_", "-") for argument in arguments)
    if config.hours is None or "--train.max-steps" in named:
        return config
    for file in files:
        hours, limit = file.get("hours"), file.get("train", {}).get("max_steps")
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
        settings = json.loads(text) if path.suffix == ".json" else _load_yaml(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
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
        raise UserError(f"--config {path} holds {type(settings).__name__}; expected e.g. `train: {{max_steps: 60}}`")
    return settings


def _drop(settings: dict[str, Any], names: Iterable[str]) -> None:
    """Remove settings by their dotted names."""
    for name in names:
        section, _, key = name.rpartition(".")
        values = settings.get(section) if section else settings
        if isinstance(values, dict):
            values.pop(key, None)


def _load_yaml(text: str) -> Any:
    """Parse YAML, or raise a ValueError if a mapping repeats a key, because PyYAML (6.0) keeps only the last."""
    import yaml

    def check(node: Any) -> None:
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"the key {twice[0]!r} is repeated; keep one")
        for _, value in node.value if keys else ():
            check(value)

    check(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.safe_load(text)
