"""`lora-grpo evaluate`: evaluate a model or a file of samples, or compare two of them, and write a report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo import console
from lora_grpo.config import check_fields
from lora_grpo.data import load_evaluation_rows, start_sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation import results as result_files
from lora_grpo.evaluation.joint import Joint, make_joint
from lora_grpo.evaluation.model_samples import Loader, Model, ModelSamples
from lora_grpo.evaluation.options import EvaluateOptions, choose_settings
from lora_grpo.evaluation.report import Graded, Report, make_report, write_report
from lora_grpo.evaluation.results import RESULTS, digest
from lora_grpo.evaluation.samples_file import SampleFile, read_samples
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelFlags, ModelSpec, resolve, run_of
from lora_grpo.prompts import template_variables
from lora_grpo.sampling import GgufModel, build, read_gguf

Target = ModelSamples | SampleFile
"""What is evaluated or compared with."""

_USUAL_KS = (1, 10, 100)
"""The k of pass@k if no flag names them, as far as there are samples."""


@dataclass(frozen=True)
class TaskEvaluation:
    """The finished evaluation of one task."""

    report: Report
    folder: Path
    """Contains results.jsonl, evaluation.json, report.json and report.md."""


@dataclass(frozen=True)
class Evaluations:
    """The finished evaluations of one command."""

    target: str
    """Name of the evaluated model, as it was given."""
    tasks: list[TaskEvaluation]
    joint: Joint | None
    """All tasks in one table, if there are several and two models."""
    joint_folder: Path

    def show(self) -> None:
        """Tell the reports and where they are."""
        if self.joint:
            self.joint.show(f"{self.target}: {len(self.tasks)} tasks")
            console.result(f"joint     {self.joint_folder / 'report.md'}")
        for task in self.tasks:
            report = task.report
            if not self.joint:
                report.show()
            if report.evaluated.tasks < report.protocol.rows:
                console.note(f"only {report.evaluated.tasks} of {report.protocol.rows} tasks have samples")
            console.result(f"results   {task.folder / RESULTS}\nreport    {task.folder / 'report.md'}")


def evaluate_and_report(options: EvaluateOptions) -> list[Report]:
    """Evaluate as `evaluate_tasks`, tell the reports and where they are, and return the report of each task."""
    evaluations = evaluate_tasks(options)
    evaluations.show()
    return [task.report for task in evaluations.tasks]


def evaluate_tasks(options: EvaluateOptions) -> Evaluations:
    """Evaluate the targets given by the flags, and write the report of each task.

    Raises:
        UserError: a flag, file or row is invalid. Existing results are not changed.
        RunError: out of memory, or programs cannot be run.
    """
    tasks = [options.task]
    if isinstance(options.task, tuple):
        tasks = list(dict.fromkeys(options.task))
    task_options = options
    if len(tasks) > 1:
        if options.data or options.columns or options.options or options.style:
            raise UserError("--data, --data.columns, --data.options and --style are of one task; pass one --task")
        task_options = dataclasses.replace(options, output_dir=None)  # the given folder is that of the joint report

    # Everything is checked before anything is loaded or written.
    loader = Loader(build.choose_backend(options.backend))
    prepared = [_prepare(dataclasses.replace(task_options, task=task), loader) for task in tasks]
    joint_request = {"requests": [target.request for task in prepared for target in task.targets]}
    joint_folder = options.output_dir or prepared[0].folder.parent / "joint" / digest(joint_request)
    has_joint = len(tasks) > 1 and bool(options.compare)
    if has_joint:
        result_files.check_folder(joint_folder, joint_request)

    try:
        finished = _run(prepared)
    finally:
        loader.close()
    joint = None
    if has_joint:
        joint = make_joint([task.report for task in finished])
        joint_folder.mkdir(parents=True, exist_ok=True)
        result_files.start(joint_folder / RESULTS, joint_request, {})
        joint.write(joint_folder)
    return Evaluations(options.target, finished, joint, joint_folder)


@dataclass(frozen=True)
class _PreparedTask:
    """An evaluation on one task that is checked and has not begun."""

    targets: list[Target]
    """The evaluated target, and the baseline if there is one."""
    ks: list[int]
    """The k of pass@k."""
    folder: Path


def _prepare(options: EvaluateOptions, loader: Loader) -> _PreparedTask:
    """Resolve and check an evaluation on one task, without loading a model."""
    targets = _targets(options, loader)
    fewest = min(target.min_samples for target in targets)
    ks = options.k or [k for k in _USUAL_KS if k <= fewest]
    largest_k = max(ks)
    if largest_k > fewest:
        raise UserError(f"--k {largest_k} exceeds {fewest}, the fewest samples of a task; pass --k {fewest} or less")
    folder = options.output_dir or _default_folder(options.target, targets[0])
    result_files.check_folder(folder, targets[0].request)
    return _PreparedTask(targets, sorted(set(ks)), folder)


def _run(tasks: Sequence[_PreparedTask]) -> list[TaskEvaluation]:
    """Sample and grade what has no results yet, and write the reports.

    All tasks are evaluated with one model and then with the next, so that each model is loaded once.
    """
    graded: list[list[Graded]] = [[] for _ in tasks]
    with contextlib.ExitStack() as locks:
        for task in tasks:
            locks.enter_context(lock.holding(task.folder))
        for index in range(len(tasks[0].targets)):
            for task, graded_targets in zip(tasks, graded, strict=True):
                target = task.targets[index]
                file = RESULTS if index == 0 else f"compared-{digest(target.request)}.{RESULTS}"
                graded_targets.append(target.grade(task.folder / file))

        finished = []
        for task, graded_targets in zip(tasks, graded, strict=True):
            report = make_report(task.ks, *graded_targets)
            write_report(task.folder, report)
            finished.append(TaskEvaluation(report, task.folder))
    return finished


def _targets(options: EvaluateOptions, loader: Loader) -> list[Target]:
    """Resolve and check the target and the baseline, without loading a model."""
    names = [options.target]
    if options.compare is not None:
        names.append(options.compare)
    check_fields(options)
    models = _resolve_models(names, options)

    # Flags must apply to a target, and the settings are those of the first model's run.
    first_model = next((model for model in models if model), None)
    has_weights = any(isinstance(model, ModelSpec) for model in models)
    options.check_used(of_weights=has_weights, of_sampling=first_model is not None)
    if options.chat_template_kwargs and all(model is None or model.run for model in models):
        raise UserError(
            f"{template_variables.KWARGS_FLAG} is for models without a run; leave it out to use those of its training"
        )
    settings = choose_settings(options, first_model.run if first_model else None)
    if first_model:
        start_sandbox(settings.data, options.sandbox)
        data = load_evaluation_rows(settings.data, settings.seed, settings.train_seed)
        loader.rows.append(data.eval)

    targets: list[Target] = []
    for name, label, model in zip(names, _labels(names, models), models, strict=True):
        if model:
            targets.append(ModelSamples(label, model, data, settings, options.sandbox, loader))
        else:
            targets.append(read_samples(Path(name).expanduser(), label, options, settings))
    unpaired = targets[0].problem_ids ^ targets[-1].problem_ids
    if unpaired:
        raise UserError(f"{len(unpaired)} tasks have samples on one side only; evaluate both on the same tasks")
    return targets


def _resolve_models(names: Sequence[str], options: EvaluateOptions) -> list[Model | None]:
    """Return the models with these names; None for a file of samples."""
    flags: ModelFlags = options
    models: list[Model | None] = []
    for name in names:
        path = Path(name).expanduser()
        if name == BASE and models:
            if models[0] is None:
                raise UserError("--compare base needs a model to evaluate, not a file of samples")
            models.append(models[0].without_adapter())
        elif path.suffix.lower() == ".gguf":
            models.append(read_gguf(path))
        elif path.is_file() or path.name.endswith((".jsonl", ".json", ".gz")):
            models.append(None)
        else:
            models.append(resolve(name, flags, bits=options.bits))
        # --base and --revision apply only to the evaluated model.
        flags = dataclasses.replace(flags, base=None, revision=None)
    return models


def _labels(names: Sequence[str], models: Sequence[Model | None]) -> Sequence[str]:
    """Return short labels of the targets, or their names if two have the same label."""
    labels = []
    for name, model in zip(names, models, strict=True):
        labels.append(model.label if model else json_files.stem(Path(name)))
    return labels if len(set(labels)) == len(labels) else names


def _default_folder(name: str, target: Target) -> Path:
    """Return the folder inside the run of a model, else below outputs/evaluation."""
    evaluation = f"{target.request['task']}-{digest(target.request)}"
    if isinstance(target, ModelSamples):
        run = _run_folder(name, target.model)
        if run:
            return run / "evaluation" / evaluation
    return Path("outputs/evaluation") / f"{name.strip('/.~').replace('/', '--')}-{evaluation}"


def _run_folder(name: str, model: Model) -> Path | None:
    if isinstance(model, GgufModel):
        return model.run_folder
    return run_of(Path(name).expanduser())
