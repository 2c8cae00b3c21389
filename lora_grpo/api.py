"""The Python API: what `lora-grpo` does, as functions that take objects and return numbers and paths.

    run = train("my_task.py", config=Config(train={"max_steps": 200}), rewards=[brief])
    evaluate(run, compare="base").scores
    merged = merge(run)

The functions call the folders that the commands call; `chat`, `tasks` and `check-gpu` have none. Each raises UserError
or RunError, prints nothing unless `progress` is set, and leaves nothing behind in the process: no process, thread,
environment variable or setting.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from lora_grpo import commands, console, distributed, process_state, python_objects
from lora_grpo.audit import Findings
from lora_grpo.config import ConfigChanges, Invocation, RunConfig, check_fields, replace
from lora_grpo.errors import Interrupted, UserError, suggestion
from lora_grpo.evaluation import Comparison, EvaluateOptions, Report, evaluate_tasks, read_report
from lora_grpo.flags import convert
from lora_grpo.gguf import ExportOptions, export
from lora_grpo.hub import PushedFiles, PushOptions, push_to_hub
from lora_grpo.memory import Plan, show_plan
from lora_grpo.merging import MergeOptions, MergeReport
from lora_grpo.merging import merge as merge_adapter
from lora_grpo.merging import read_report as read_merge_report
from lora_grpo.pipeline import audit_run, plan_run, preview_run, train_run
from lora_grpo.preview import Preview
from lora_grpo.report import write_report
from lora_grpo.runs import Line, end_run, leave_run, read_metrics, read_record
from lora_grpo.settings import Recipe, read_recipe, recipe_of_task, settle
from lora_grpo.tasks import of_object
from lora_grpo.verify import VerifyOptions, VerifyReport
from lora_grpo.verify import verify as verify_adapter

Reward = str | Callable[..., Any] | tuple[Callable[..., Any], float]
"""`"correct_answer=2.0"`, a function `(completions, **columns)`, or a function with its weight."""
ProgressListener = bool | console.Listener | None
"""True prints as the command line does; a function gets each `console.Message`; None and False are silent."""


class Config:
    """Settings of a run: those of the flags, in sections, such as `Config(preset="12gb", train={"max_steps": 200})`.

    Settings that are left out have the values of the preset. `lora-grpo train gsm8k --help-all` lists all of them.

    Args:
        preset: defaults for a GPU size, such as "12gb", or "starter" for a CPU. "auto" detects the hardware.
        settings: `seed`, `hours`, `output_dir`, `rewards` and `grpo`, and the sections `model`, `lora`, `data`,
            `sampling`, `train`, `teacher`, `monitor`, `eval` and `sandbox` as dictionaries.

    Raises:
        UserError: a setting is unknown, or has a wrong type or a value outside of its range.
    """

    def __init__(
        self,
        preset: str = "auto",
        *,
        seed: int | None = None,
        hours: float | None = None,
        output_dir: str | Path | None = None,
        model: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        rewards: Sequence[str] | None = None,
        train: Mapping[str, Any] | None = None,
        teacher: Mapping[str, Any] | None = None,
        monitor: Mapping[str, Any] | None = None,
        eval: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
        grpo: Sequence[str] | None = None,
        **unknown: Any,
    ) -> None:
        sections: dict[str, Mapping[str, Any] | None] = {
            "model": model,
            "lora": lora,
            "data": data,
            "sampling": sampling,
            "train": train,
            "teacher": teacher,
            "monitor": monitor,
            "eval": eval,
            "sandbox": sandbox,
        }
        values: dict[str, Any] = {"seed": seed, "hours": hours, "rewards": rewards, "grpo": grpo}
        if preset != "auto":
            values["preset"] = preset
        if output_dir is not None:
            values["output_dir"] = str(output_dir)
        settings = {name: value for name, value in values.items() if value is not None}
        for name, section in sections.items():
            if section is not None:
                settings[name] = dict(section) if isinstance(section, Mapping) else section
        settings |= unknown
        check_fields(replace(RunConfig(), settings))
        self._settings: dict[str, Any] = settings

    @property
    def settings(self) -> dict[str, Any]:
        """A copy of the settings that were given, by section."""
        settings = {}
        for name, value in self._settings.items():
            settings[name] = dict(value) if isinstance(value, dict) else value
        return settings

    def with_changes(self, **changes: Any) -> "Config":
        """Return a copy with other settings; sections are merged: `config.with_changes(train={"max_steps": 400})`."""
        settings = self.settings
        for name, value in changes.items():
            if isinstance(value, Mapping):
                value = {**settings.get(name, {}), **value}
            settings[name] = value
        return Config(**settings)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"Config({given})"


@dataclass(frozen=True)
class TrainedRun:
    """A finished run. The functions of the API take it in place of its folder."""

    folder: Path
    adapter: Path
    """The trained adapter in PEFT's format, with its tokenizer."""
    best: Path | None
    """The adapter with the highest validation reward; None if there was no validation."""
    evaluation: Report
    """The base against the trained model, with intervals and paired tests."""
    page: Path
    """The report: one HTML page."""
    objects: python_objects.Objects = field(default_factory=python_objects.Objects, repr=False)
    """The Python objects that were given in place of names."""

    @property
    def table(self) -> list[Comparison]:
        """One row per metric: before, after, difference and p-value."""
        return self.evaluation.table

    @property
    def metrics(self) -> list[Line]:
        """The lines of metrics.jsonl, one per step."""
        return read_metrics(self.folder)

    @property
    def record(self) -> dict[str, Any]:
        """run.json: settings, versions, data and results."""
        return read_record(self.folder)

    def __fspath__(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation of one or several tasks."""

    reports: tuple[Report, ...]
    """One per task, in the order of the tasks."""
    folders: tuple[Path, ...]
    """The folder of each task, with results.jsonl, report.json and report.md."""

    @property
    def report(self) -> Report:
        """The report of the only, or of the first, task."""
        return self.reports[0]

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the evaluated model, from 0 to 1, such as `{"pass@1": 0.97}`."""
        return dict(self.report.evaluated.scores)

    @property
    def table(self) -> list[Comparison]:
        """The comparison with the baseline, one row per score; empty without one."""
        return self.report.table


@dataclass(frozen=True)
class Merged:
    """A merged model in the format of transformers."""

    folder: Path
    report: MergeReport
    """The dtype, the fraction of the update that it keeps, and KL divergences."""

    def __fspath__(self) -> str:
        return str(self.folder)


Source = str | Path | TrainedRun | Merged
"""A run, or a path or name that the command of the same name accepts."""


def train(
    task: Any = None,
    *,
    config: Config | None = None,
    recipe: str | None = None,
    method: Literal["grpo", "sft"] = "grpo",
    rewards: Sequence[Reward] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    callbacks: Sequence[Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: ProgressListener = None,
) -> TrainedRun:
    """Train an adapter, and evaluate the model before and after.

    Args:
        task: what to train on: a name such as "gsm8k", a task file, a module, or an object or a class with `load` and
            `check`, or with `load` and a class `Environment`. Default: the task of the recipe.
        config: settings; default: those of the preset for this machine.
        recipe: a name as in `lora-grpo train NAME`, or a recipe file, whose presets are used. A file for SFT has
            `METHOD = "sft"`. Default: the recipe for the task.
        method: that of the recipe: "grpo", or "sft" for supervised fine-tuning on the task's reference answers.
        rewards: in place of those of the config, the task or the preset.
        train_dataset: rows of the training set: a list of dictionaries or a `datasets.Dataset`, with the columns that
            the task reads. Default: the task's own.
        eval_dataset: rows of the evaluation set.
        callbacks: `transformers.TrainerCallback` objects.
        resume: continue the run in the output folder from its newest checkpoint.
        overwrite: delete an existing run in the output folder first.
        progress: True to print as the command line does, or a function that gets messages.

    Returns:
        The finished run.

    Raises:
        UserError: a setting, a row or a file is wrong. The folder is as it was.
        RunError: the run has failed.
        KeyboardInterrupt: it was interrupted. A checkpoint was saved; `resume=True` continues.
    """
    objects = python_objects.Objects()
    with _call("train", progress, objects) as resources:
        definition, given = _recipe_and_settings(
            objects, task, config, recipe, method, rewards, train_dataset, eval_dataset
        )
        invocation = Invocation(resume=resume, overwrite=overwrite)
        settings = settle(given, invocation, definition)
        run = train_run(settings, invocation, definition, callbacks, resources)
        report = read_report(run.evaluation)
        assert report
        return TrainedRun(
            folder=run.folder,
            adapter=run.adapter,
            best=run.best if run.record.get("best") else None,
            evaluation=report,
            page=run.folder / "report" / "report.html",
            objects=objects,
        )


def plan(
    task: Any = None,
    *,
    config: Config | None = None,
    recipe: str | None = None,
    method: Literal["grpo", "sft"] = "grpo",
    rewards: Sequence[Reward] | None = None,
    progress: ProgressListener = None,
) -> Plan:
    """Plan the memory and the work of a run. Loads neither weights nor data. See `train` for the arguments.

    Raises:
        UserError: a setting is wrong, or the run does not fit this machine.
    """
    objects = python_objects.Objects()
    with _call("plan", progress, objects):
        definition, given = _recipe_and_settings(objects, task, config, recipe, method, rewards)
        invocation = Invocation(plan=True)
        planned = plan_run(settle(given, invocation, definition), invocation)
        show_plan(planned)
        return planned


def preview(
    task: Any = None,
    *,
    config: Config | None = None,
    recipe: str | None = None,
    rewards: Sequence[Reward] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    progress: ProgressListener = None,
) -> Preview:
    """Sample the model before training on 8 prompts, and judge whether GRPO can learn. See `train` for the arguments.

    Returns:
        The groups of completions with their rewards, their summary, and the verdict with its findings.
    """
    objects = python_objects.Objects()
    with _call("preview", progress, objects):
        definition, given = _recipe_and_settings(
            objects, task, config, recipe, None, rewards, train_dataset, eval_dataset
        )
        invocation = Invocation(preview=True)
        return preview_run(settle(given, invocation, definition), invocation)


def audit(
    task: Any = None,
    *,
    config: Config | None = None,
    recipe: str | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    progress: ProgressListener = None,
) -> dict[str, Findings]:
    """Try to fool the graders of a run's tasks with wrong completions. See `train` for the arguments.

    Returns:
        What was found, by the name of the task. `findings.problems` is empty if nothing was.
    """
    objects = python_objects.Objects()
    with _call("audit", progress, objects):
        definition, given = _recipe_and_settings(objects, task, config, recipe, None, None, train_dataset, eval_dataset)
        return audit_run(settle(given, Invocation(audit=True), definition))


def evaluate(
    source: Source,
    *,
    task: Any = None,
    compare: Source | None = None,
    progress: ProgressListener = None,
    **options: Any,
) -> Evaluation:
    """Evaluate a run, an adapter, a model or a GGUF file, and compare it with another one.

    Args:
        source: a run, a folder, a Hub id, "starter", or a file of samples.
        task: a task as in `train`, or a list of task names. Default: the task of the run.
        compare: the baseline: "base", or another source.
        options: the fields of `lora_grpo.evaluation.EvaluateOptions`, such as `limit=100`, `k=(1, 4)`.

    Raises:
        UserError: an option, a file or a row is wrong.
        RunError: out of memory, or programs cannot be run.
    """
    objects = _objects_of(source)
    with _call("evaluate", progress, objects):
        tasks: str | tuple[str, ...] | None = None
        if isinstance(task, (list, tuple)):
            tasks = tuple(task)
        elif task is not None:
            tasks = _task_name(objects, task)
        elif isinstance(source, TrainedRun):
            tasks = _task_of_run(source)
        values = {"source": _path(source), "task": tasks, **options}
        if compare is not None:
            values["compare"] = _path(compare)
        evaluations = evaluate_tasks(_options(EvaluateOptions, values))
        evaluations.show()
        return Evaluation(
            reports=tuple(evaluated.report for evaluated in evaluations.tasks),
            folders=tuple(evaluated.folder for evaluated in evaluations.tasks),
        )


def merge(source: Source, *, progress: ProgressListener = None, **options: Any) -> Merged:
    """Merge an adapter into its base model. A merge that exists is returned as it is.

    Args:
        source: a run, or the folder or Hub id of an adapter.
        options: the fields of `lora_grpo.merging.MergeOptions`, such as `dtype="bf16"`, `what="best"`.

    Raises:
        UserError: the adapter cannot be merged; nothing is written.
        RunError: a merged weight is NaN or infinite, or the disk is full.
    """
    with _call("merge", progress, _objects_of(source)):
        folder = merge_adapter(_options(MergeOptions, {"source": _path(source), **options}))
        report = read_merge_report(folder)
        assert report
        return Merged(folder, report)


def export_gguf(source: Source, *, progress: ProgressListener = None, **options: Any) -> tuple[Path, ...]:
    """Export a run or a merged model as GGUF files for llama.cpp, Ollama and LM Studio.

    Args:
        source: a run or an adapter, which is merged first if needed, or a merged model.
        options: the fields of `lora_grpo.gguf.ExportOptions`, such as `type="q4_k_m"`, `modelfile=True`.

    Returns:
        The path of the file of each type.

    Raises:
        UserError: llama.cpp would compute something else than transformers, or an option is wrong.
    """
    if isinstance(options.get("type"), str):
        options["type"] = (options["type"],)
    with _call("export_gguf", progress, _objects_of(source)):
        return export(_options(ExportOptions, {"source": _path(source), **options}))


def push(source: Source, repository: str, *, progress: ProgressListener = None, **options: Any) -> PushedFiles:
    """Push a model to the Hugging Face Hub, with a model card that reports the measured results.

    Args:
        source: a run, or the folder of an adapter, a merged model or GGUF files.
        repository: such as "me/my-model". It is private unless `public=True` is passed.
        options: the fields of `lora_grpo.hub.PushOptions`, such as `what="merged"`, `dry_run=True`.

    Raises:
        UserError: an argument, a file, or a permission is wrong. The repository is unchanged.
        RunError: the Hub or the connection failed. The repository is unchanged.
    """
    with _call("push", progress, _objects_of(source)):
        return push_to_hub(_options(PushOptions, {"source": _path(source), "repository": repository, **options}))


def verify(
    source: Source, against: Source | Sequence[Source], *, progress: ProgressListener = None, **options: Any
) -> VerifyReport:
    """Find out whether engines, files and servers use an adapter, or its base.

    Args:
        source: a run, or the folder or Hub id of an adapter.
        against: one or several of: a merged model, the path of a GGUF file, "transformers", "vllm", or the address of
            an OpenAI-compatible server with the name of a model, "http://127.0.0.1:8000#NAME".
        options: the fields of `lora_grpo.verify.VerifyOptions`, such as `prompts="prompts.txt"`.

    Raises:
        UserError: the adapter, a target or the prompts are wrong.
        RunError: a server does not answer in time.
    """
    targets = [against] if isinstance(against, (str, Path, TrainedRun, Merged)) else against
    with _call("verify", progress, _objects_of(source)):
        values = {"source": _path(source), "against": tuple(_path(target) for target in targets), **options}
        return verify_adapter(_options(VerifyOptions, values))


def report(source: Source, *, progress: ProgressListener = None) -> Path:
    """Write the report of a run, finished or not, as one HTML page, and return its path."""
    with _call("report", progress, _objects_of(source)):
        return write_report(Path(_path(source)))


# What the functions share


@contextlib.contextmanager
def _call(function: str, progress: ProgressListener, objects: python_objects.Objects) -> Iterator[contextlib.ExitStack]:
    """Run the body of a function of the API: with its listener and objects, and without traces in the process.

    Yields:
        A stack for engines, which are closed at the end.
    """
    listener: console.Listener | None = None
    if progress is True:
        listener = console.Terminal()
    elif progress:
        listener = progress
    with (
        process_state.restored(),
        contextlib.ExitStack() as resources,
        commands.started(commands.Start("python", (f"lora_grpo.{function}",))),
        console.listening(listener),
        python_objects.known(objects),
    ):
        process_state.limit_spinning()
        process_state.do_not_track()
        try:
            with distributed.member():
                yield resources
        except BaseException as error:
            told = end_run(error)
            if isinstance(told, (Interrupted, KeyboardInterrupt)):
                raise KeyboardInterrupt(str(told) or "interrupted") from error
            if told is error:
                raise
            raise told from error
        finally:
            leave_run()


def _recipe_and_settings(
    objects: python_objects.Objects,
    task: Any,
    config: Config | None,
    recipe: str | None,
    method: Literal["grpo", "sft"] | None,
    rewards: Sequence[Reward] | None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe and the settings of a call, with names in place of its objects.

    Args:
        method: None for a function that has no such argument.

    Raises:
        UserError: the recipe is for the other method, so that its learning rate is, too; or an argument is wrong.
    """
    settings = (config or Config()).settings
    method_of_config = settings.pop("method", method)  # a config with the settings of a run.json has it
    if method and method_of_config != method:
        raise UserError(f"config has method {method_of_config!r}; pass method={method_of_config!r} to the function")
    data = settings.setdefault("data", {})
    if task is not None:
        data["task"] = _task_name(objects, task)
    for name, rows in (("train", train_dataset), ("eval", eval_dataset)):
        if rows is not None:
            data[name] = objects.add(f"{name}_dataset", rows)
    if rewards is not None:
        settings["rewards"] = tuple(_reward_spec(objects, reward) for reward in rewards)
    definition = read_recipe(recipe or recipe_of_task(data.get("task"), method or "grpo"))
    if method and definition.method != method:
        right = repr(definition.method)
        raise UserError(f"the recipe {recipe} has method {right}; pass method={right}, or another recipe")
    return definition, settings


def _task_name(objects: python_objects.Objects, task: Any) -> str:
    """Return the name by which settings refer to a task."""
    if isinstance(task, (str, Path)):
        return str(task)
    if isinstance(task, ModuleType):
        if not task.__file__:
            raise UserError(f"{task.__name__} is a module without a file; pass an object with load and check")
        return task.__file__
    python_class = task if isinstance(task, type) else type(task)
    name = python_class.__name__
    full_name = f"python:{name}"
    if objects.sources.get(full_name) is task:  # of the run that is evaluated
        return full_name
    return objects.add(name, of_object(name, task), source=task)


def _reward_spec(objects: python_objects.Objects, reward: Reward) -> str:
    """Return a reward as `NAME=WEIGHT`."""
    if isinstance(reward, str):
        return reward
    function: Any = reward
    weight = 1.0
    if isinstance(reward, tuple):
        function, weight = reward
    if not callable(function):
        raise UserError(f"reward {function!r:.60} is not a function; pass a name, a function or (function, weight)")
    unwrapped = function
    if isinstance(function, functools.partial):
        unwrapped = function.func
    name = getattr(unwrapped, "__name__", type(unwrapped).__name__).strip("<>")
    return f"{objects.add(name, function, source=unwrapped)}={weight!r}"


def _objects_of(source: Any) -> python_objects.Objects:
    """Return the objects of a run that this process has trained, in a copy that further ones can join."""
    if not isinstance(source, TrainedRun):
        return python_objects.Objects()
    return python_objects.Objects(dict(source.objects.values), dict(source.objects.sources))


def _task_of_run(run: TrainedRun) -> str | None:
    """Return the task file of a run. It is named by the caller's own call of `train`, so it may run."""
    data = run.record["config"]["data"]
    task = data["eval_task"] or data["task"]
    return task if task.endswith(".py") else None


def _path(source: Source) -> str:
    if isinstance(source, (TrainedRun, Merged)):
        return str(source.folder)
    return str(source)


def _options(kind: type[Any], values: ConfigChanges) -> Any:
    """Return the options of a command, with the types and ranges of its flags."""
    names = kind.__dataclass_fields__
    for name in values:
        if name not in names:
            raise UserError(f"unknown option {name!r}; {suggestion(name, names)}")
    return convert(kind, {name: _with_home(value) for name, value in values.items()})


def _with_home(value: Any) -> Any:
    """Return the value of an option with the home folder in place of `~`, as a shell passes it to a command."""
    if isinstance(value, (str, Path)) and str(value).startswith("~/"):
        return str(Path(value).expanduser())
    return value
