"""From arguments to a checked configuration: preset, then `--config` file, then flags, each over the one before."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import json
import operator
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lora_grpo import distributed
from lora_grpo.cli.validate import check
from lora_grpo.config import Invocation, Overrides, RunConfig, choose_preset, flag
from lora_grpo.errors import UserError
from lora_grpo.models import check_model


@dataclass(frozen=True)
class _Arguments:
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    how: Annotated[Invocation, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Invocation)
    config: str | None = None
    """YAML or JSON file of settings (a run.json too); flags go over it."""


def parse(
    arguments: Sequence[str], *, recipe: str, description: str, presets: Mapping[str, Overrides]
) -> tuple[RunConfig, Invocation]:
    """Read the command line of a recipe and return a configuration that passed every check.

    Args:
        arguments: the arguments after the program's name.
        recipe: the recipe's name; the default output folder is `outputs/<recipe>`.
        description: text above the list of flags in `--help`.
        presets: what each preset changes in the defaults of `RunConfig`.

    Raises:
        UserError: anything the user can fix; nothing has been imported or written.
        SystemExit: `--help` was asked for.
    """
    arguments = list(arguments)
    _refuse_split_lists(arguments)
    if {"-h", "--help"} & set(arguments):
        shown = _Arguments(replace(RunConfig(output_dir=f"outputs/{recipe}"), presets["starter"]))
        # tyro writes its help and raises SystemExit(0).
        about = f"{description}\nPresets: auto, {', '.join(presets)}. The defaults below are those of `starter`."
        tyro.cli(_Arguments, args=["--help"], default=shown, prog=f"{recipe}.py", description=about)
    path = _last_value(arguments, "--config")
    file_arguments = _read_file(Path(path)) if path is not None else []
    if "--resume" in arguments:
        folder = Path(_last_value([*file_arguments, *arguments], "--output-dir") or f"outputs/{recipe}")
        if (folder / "run.json").is_file():
            # What the run was asked for stands under what this command asks for; only the folder may have moved.
            file_arguments = [*_read_file(folder / "run.json"), *file_arguments, "--output-dir", str(folder)]
    wanted = _last_value([*file_arguments, *arguments], "--preset") or "auto"
    preset, reason = choose_preset(wanted, presets, planning="--plan" in arguments)
    defaults = replace(RunConfig(output_dir=f"outputs/{recipe}"), presets[preset])
    if path is not None:
        _parse_flags(file_arguments, defaults, where=f"--config {path}: ")
    parsed = _parse_flags([*file_arguments, *arguments], defaults)
    config = _settle_task(dataclasses.replace(parsed.run, preset=preset))
    if not config.output_dir:
        raise UserError("--output-dir is empty; give the folder of the run")
    check(config)
    if not parsed.how.plan:  # which needs neither weights nor engines here
        check_model(config)
    if parsed.how.resume and parsed.how.overwrite:
        raise UserError("--resume goes on with a run and --overwrite deletes it; pass one of them")
    _check_preview(parsed.how)
    print(reason, file=sys.stderr)
    return config, parsed.how


def _check_preview(how: Invocation) -> None:
    """Refuse a preview that is asked for something else besides, or of several processes."""
    others = [entry.name for entry in dataclasses.fields(how) if getattr(how, entry.name) and entry.name != "preview"]
    if how.preview and others:
        raise UserError(f"--preview writes nothing and goes with no {flag(others[0])}; pass one of them")
    if how.preview and distributed.world_size() > 1:
        raise UserError(f"--preview samples in one process, and {distributed.world_size()} were started; start one")


def replace(config: Any, changes: Overrides) -> Any:
    """Return a nested frozen dataclass with nested changes made.

    Raises:
        UserError: a key that the dataclass does not have; the nearest one is offered.
    """
    names = [entry.name for entry in dataclasses.fields(config)]
    for key in changes:
        if key not in names:
            raise UserError(_unknown(key, names))
    return dataclasses.replace(
        config,
        **{
            key: replace(getattr(config, key), value) if dataclasses.is_dataclass(getattr(config, key)) else value
            for key, value in changes.items()
        },
    )


def _settle_task(config: RunConfig) -> RunConfig:
    """Read files that are given over the starter's own problems as GSM8K is read: `question` and `answer`."""
    given = [name for name in ("train", "eval") if getattr(config.data, name)]
    if config.data.task == "starter-code" and given:
        raise UserError(
            f"--data.{given[0]} is given for starter-code, which generates its problems; say what the file holds, e.g. "
            "--data.task mbpp --data.eval-task humaneval"
        )
    if config.data.task != "starter" or not given:
        return config
    if len(given) == 1:
        other = "eval" if given == ["train"] else "train"
        raise UserError(
            f"--data.{given[0]} is given and --data.{other} is not; the starter's problems do not go with it"
        )
    return replace(config, {"data": {"task": "gsm8k"}})


def _parse_flags(arguments: list[str], defaults: RunConfig, where: str = "") -> _Arguments:
    """Let tyro read the flags, with its boxed messages brought down to one line."""
    known = flag_names()
    for argument in arguments:
        name = argument.split("=", 1)[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            raise UserError(where + _unknown(name, known))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(_Arguments, args=arguments, default=_Arguments(defaults))
    except SystemExit:
        lines = [line.strip("│╭╮╰╯─ ") for line in said.getvalue().splitlines()]
        body = [line for line in lines[1:] if line]
        text = (
            " ".join(body).split("For full helptext")[0].split("Argument helptext")[0].strip()
            or "the arguments cannot be read"
        )
        raise UserError(where + text) from None


def flag_names() -> list[str]:
    """Return every flag, with the `no-` forms of switches."""
    names = ["--config"]
    for group, prefix in ((Invocation, ""), (RunConfig, "")):
        for path, is_switch in _leaves(group, prefix):
            names.append(flag(path))
            if is_switch:
                head, _, tail = path.rpartition(".")
                names.append(flag(f"{head}.no-{tail}" if head else f"no-{tail}"))
    return names


def _leaves(cls: Any, prefix: str) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for entry in dataclasses.fields(cls):
        factory = entry.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            found += _leaves(factory, f"{prefix}{entry.name}.")
        else:
            found.append((prefix + entry.name, isinstance(entry.default, bool)))
    return found


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    kind = "flag" if name.startswith("--") else "key"
    return f"unknown {kind} {name}; " + (f"did you mean {near[0]}?" if near else "--help lists them")


def _refuse_split_lists(arguments: Sequence[str]) -> None:
    """Refuse a flag of several values that is given twice: the second would silently replace the first."""
    given = Counter(argument.partition("=")[0].replace("_", "-") for argument in arguments)
    for path, _ in _leaves(RunConfig, ""):
        if given[flag(path)] > 1 and isinstance(operator.attrgetter(path)(RunConfig()), tuple):
            raise UserError(f"{flag(path)} is given {given[flag(path)]} times; give all its values after one")


def _last_value(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of the last `name VALUE` or `name=VALUE`, spelled with dashes or underscores."""
    value = None
    for position, argument in enumerate(arguments):
        given, equals, text = argument.partition("=")
        if given.replace("_", "-") != name:
            continue
        if not equals and position + 1 == len(arguments):
            raise UserError(f"{name} needs a value")
        value = text if equals else arguments[position + 1]
    return value


def _read_file(path: Path) -> list[str]:
    """Write a settings file out as flags, so that files and flags are read and refused by the same code."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--config {path} cannot be read: {reason}") from None
    try:
        # JSON first: YAML reads `1e-05`, which json.dump writes, as text.
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(settings, dict) and "config" in settings and "lora_grpo_run" in settings:
        # What was worked out for the GPU of then is worked out again.
        for name in (settings.get("memory") or {}).get("derived", []):
            section, _, key = name.partition(".")
            settings["config"].get(section, {}).pop(key, None)
        settings = settings["config"]
    if settings is None and not text.strip():
        raise UserError(f"--config {path} is empty; expected settings such as `train: {{max_steps: 60}}`")
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} holds {type(settings).__name__}; expected a mapping such as `train: {{…}}`")
    return _flags_of(settings, "", str(path))


def _flags_of(settings: Mapping[str, Any], prefix: str, where: str) -> list[str]:
    switches = dict(_leaves(RunConfig, ""))
    sections = {path.rsplit(".", 1)[0] for path in switches if "." in path}
    arguments: list[str] = []
    for key, value in settings.items():
        path = prefix + str(key).replace("-", "_")
        if path in sections:
            if not isinstance(value, dict):
                raise UserError(f"{where}: {path} holds {type(value).__name__}; expected a mapping of settings")
            arguments += _flags_of(value, f"{path}.", where)
        elif path not in switches:
            raise UserError(f"{where}: {_unknown(path, [*switches, *sections])}")
        elif switches[path]:
            if not isinstance(value, bool):
                raise UserError(f"{where}: {path} is {value!r}; expected true or false")
            head, _, tail = path.rpartition(".")
            arguments.append(flag(path) if value else flag(f"{head}.no-{tail}" if head else f"no-{tail}"))
        elif value is None and functools.reduce(getattr, path.split("."), RunConfig()) is not None:
            raise UserError(f"{where}: {path} is empty; give a value or leave the key out")
        elif isinstance(value, dict):
            arguments += [flag(path), *_pairs(path, value)]
        elif isinstance(value, list):
            # `- correct_answer: 2.0` is YAML for a mapping of one.
            texts = (_pairs(path, entry) if isinstance(entry, dict) else [str(entry)] for entry in value)
            arguments += [flag(path), *itertools.chain.from_iterable(texts)]
        else:
            arguments.append(f"{flag(path)}={value}")  # in one word: the value may begin with a dash
    return arguments


def _pairs(path: str, values: Mapping[str, Any]) -> list[str]:
    """Write a mapping as NAME=VALUE words; a reward without a scale has the usual one."""
    return [
        str(name) if entry is None and path == "rewards" else f"{name}={json.dumps(entry)}"
        for name, entry in values.items()
    ]
