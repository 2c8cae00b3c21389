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
from lora_grpo.evaluation.results import RESULTS, Request, digest
from lora_grpo.evaluation.samples_file import SampleFile, read_samples
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelFlags, ModelSpec, resolve, run_of
from lora_grpo.prompts import template_variables
from lora_grpo.sampling import GgufModel, build, read_gguf
from lora_grpo.tasks import CODE_TASKS

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
class JointEvaluation:
    """The finished comparison of two models on several tasks, in one table."""

    report: Joint
    folder: Path
    """Contains evaluation.json, report.json and report.md."""


@dataclass(frozen=True)
class Evaluations:
    """The finished evaluations of one command."""

    target: str
    """Name of the evaluated model, as it was given."""
    tasks: list[TaskEvaluation]
    joint: JointEvaluation | None
    """None for one task, and for one model."""

    def show(self) -> None:
        """Tell the reports and where they are."""
        if self.joint:
            self.joint.report.show(f"{self.target}: {len(self.tasks)} tasks")
            console.result(f"joint     {self.joint.folder / 'report.md'}")
        for task in self.tasks:
            report = task.report
            if not self.joint:
                report.show()
            elif report.left_out:
                console.note(f"{report.protocol.task}: {report.left_out}")
            if report.evaluated.tasks < report.protocol.rows and not report.left_out:
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
        # With several tasks, --output-dir is the folder of the joint report, and each task has its default folder.
        task_options = dataclasses.replace(options, output_dir=None)

    # Everything is checked before anything is loaded or written.
    loader = Loader(build.choose_backend(options.backend))
    prepared = [_prepare(dataclasses.replace(task_options, task=task), loader) for task in tasks]
    prepared_joint = None
    if len(tasks) > 1 and options.compare:
        prepared_joint = _prepare_joint(prepared, options.output_dir)

    try:
        finished = _run(prepared)
    finally:
        loader.close()
    joint = _write_joint(prepared_joint, finished) if prepared_joint else None
    return Evaluations(options.target, finished, joint)


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


@dataclass(frozen=True)
class _PreparedJoint:
    """The joint report of several tasks, whose folder is checked."""

    request: Request
    """The requests of all models on all tasks."""
    folder: Path


def _prepare_joint(tasks: Sequence[_PreparedTask], output_dir: Path | None) -> _PreparedJoint:
    """Choose and check the folder of a joint report: `--output-dir`, else one beside the folders of the tasks."""
    request: Request = {"requests": [target.request for task in tasks for target in task.targets]}
    folder = output_dir or tasks[0].folder.parent / "joint" / digest(request)
    result_files.check_folder(folder, request)
    return _PreparedJoint(request, folder)


def _write_joint(prepared: _PreparedJoint, tasks: Sequence[TaskEvaluation]) -> JointEvaluation:
    """Write the joint report, and evaluation.json, by which the same command recognizes the folder."""
    joint = make_joint([task.report for task in tasks])
    prepared.folder.mkdir(parents=True, exist_ok=True)
    result_files.start(prepared.folder / RESULTS, prepared.request, environment={})
    joint.write(prepared.folder)
    return JointEvaluation(joint, prepared.folder)


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
                file_name = RESULTS
                if index > 0:  # the baseline
                    file_name = f"compared-{digest(target.request)}.{RESULTS}"
                graded_targets.append(target.grade(task.folder / file_name))

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
    models_of_targets = _resolve_models(names, options)
    models = [model for model in models_of_targets if model is not None]

    # Each flag must apply to at least one of the targets.
    has_weights = any(isinstance(model, ModelSpec) for model in models)
    options.check_used(has_model=bool(models), has_weights=has_weights)
    has_model_without_run = any(not model.run for model in models)
    if options.chat_template_kwargs and not has_model_without_run:
        raise UserError(
            f"{template_variables.KWARGS_FLAG} is for models without a run; leave it out to use those of its training"
        )

    # All targets have the same settings and rows. The run of the first model has the defaults.
    settings = choose_settings(options, models[0].run if models else None)
    if options.style and not models and settings.task in CODE_TASKS:
        raise UserError(f"--style does not apply to programs in {options.target}; leave it out")
    if models:
        start_sandbox(settings.data, options.sandbox)
        data = load_evaluation_rows(settings.data, settings.seed, settings.train_seed)
        loader.add_rows(data.eval)

    targets: list[Target] = []
    for name, label, model in zip(names, _labels(names, models_of_targets), models_of_targets, strict=True):
        if model:
            targets.append(ModelSamples(label, model, data, settings, options.sandbox, loader))
        else:
            targets.append(read_samples(Path(name).expanduser(), label, options, settings))
    if len(targets) == 2:
        unpaired_ids = targets[0].problem_ids ^ targets[1].problem_ids
        if unpaired_ids:
            raise UserError(f"{len(unpaired_ids)} tasks have samples on one side only; evaluate both on the same tasks")
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
    """Return the folder of an evaluation: in the run of the evaluated model; without a run, in outputs/evaluation."""
    task_and_digest = f"{target.request['task']}-{digest(target.request)}"
    run = _run_folder(name, target.model) if isinstance(target, ModelSamples) else None
    if run:
        return run / "evaluation" / task_and_digest
    target_name = name.strip("/.~").replace("/", "--")
    return Path("outputs/evaluation") / f"{target_name}-{task_and_digest}"


def _run_folder(name: str, model: Model) -> Path | None:
    if isinstance(model, GgufModel):
        return model.run_folder
    return run_of(Path(name).expanduser())
