"""`lora-grpo evaluate`: evaluate a model or a file of samples, or compare two of them, and write a report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lora_grpo import __version__, console, sandbox
from lora_grpo.config import check_fields
from lora_grpo.data import Data, fingerprint, load_evaluation_rows, start_sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation import results as result_files
from lora_grpo.evaluation.joint import make_joint
from lora_grpo.evaluation.options import EvaluateOptions, EvaluationSettings, choose_settings
from lora_grpo.evaluation.report import Graded, Protocol, Report, make_protocol, make_report, write_report
from lora_grpo.evaluation.results import RESULTS, Request, digest, task_id
from lora_grpo.evaluation.run import finished_samples, sample_and_grade
from lora_grpo.evaluation.samples_file import SampleFile, read_samples
from lora_grpo.files import json_files, lock
from lora_grpo.grading import Row
from lora_grpo.models import BASE, ModelFlags, ModelSpec, resolve, run_of
from lora_grpo.prompts import chat, template_variables
from lora_grpo.sampling import GgufModel, GgufSampler, Sampler, build, read_gguf
from lora_grpo.tasks import CODE_TASKS


@dataclass(frozen=True)
class EvaluatedTask:
    """The evaluation of one task."""

    folder: Path
    """The folder with results.jsonl, report.json and report.md."""
    report: Report


def evaluate_and_report(options: EvaluateOptions) -> list[Report]:
    """Return the report of each task; see `evaluate_tasks`."""
    return [task.report for task in evaluate_tasks(options)]


def evaluate_tasks(options: EvaluateOptions) -> list[EvaluatedTask]:
    """Evaluate the targets given by the flags, write and tell the report of each task, and return them.

    Raises:
        UserError: a flag, file or row is invalid. Existing results are not changed.
        RunError: out of memory, or programs cannot be run.
    """
    tasks = [*dict.fromkeys(options.task)] if isinstance(options.task, tuple) else [options.task]
    several, folder, loader = len(tasks) > 1, options.output_dir, Loader(build.choose_backend(options.backend))
    if several:
        if options.data or options.columns or options.options or options.style:
            raise UserError("--data, --data.columns, --data.options and --style are of one task; pass one --task")
        options = dataclasses.replace(options, output_dir=None)  # the given folder is that of the joint report
    evaluations = [_prepare(dataclasses.replace(options, task=task), loader) for task in tasks]
    joint_request = {"requests": [target.request for evaluation in evaluations for target in evaluation.targets]}
    folder = folder or evaluations[0].folder.parent / "joint" / digest(joint_request)
    if is_joint := several and bool(options.compare):
        result_files.check_folder(folder, joint_request)
    try:
        reports = _run(evaluations)
    finally:
        loader.close()
    if is_joint:
        joint = make_joint(reports)
        folder.mkdir(parents=True, exist_ok=True)
        result_files.start(folder / RESULTS, joint_request, {})
        joint.write(folder)
        joint.show(f"{options.target}: {len(tasks)} tasks")
        console.result(f"joint     {folder / 'report.md'}")
    for evaluation, report in zip(evaluations, reports, strict=True):
        if not is_joint:
            report.show()
        if report.evaluated.tasks < report.protocol.rows:
            console.note(f"only {report.evaluated.tasks} of {report.protocol.rows} tasks have samples")
        console.result(f"results   {evaluation.folder / RESULTS}\nreport    {evaluation.folder / 'report.md'}")
    return [EvaluatedTask(evaluation.folder, report) for evaluation, report in zip(evaluations, reports, strict=True)]


class _Evaluation(NamedTuple):
    """One task: the target and the baseline, if any, the values of k, and the folder of the results."""

    targets: list[ModelSamples | SampleFile]
    ks: list[int]
    folder: Path


def _prepare(options: EvaluateOptions, loader: Loader) -> _Evaluation:
    """Resolve and check an evaluation on one task, without loading a model."""
    targets = _targets(options, loader)
    fewest = min(target.min_samples for target in targets)
    ks = sorted(set(options.k or (k for k in (1, 10, 100) if k <= fewest)))
    if ks[-1] > fewest:
        raise UserError(f"--k {ks[-1]} exceeds {fewest}, the fewest samples of a task; pass --k {fewest} or less")
    folder = options.output_dir or _default_folder(options.target, targets[0])
    result_files.check_folder(folder, targets[0].request)
    return _Evaluation(targets, ks, folder)


def _run(evaluations: Sequence[_Evaluation]) -> list[Report]:
    """Sample and grade what has no results yet, all tasks with one model and then with the next. Write the reports."""
    reports, graded = list[Report](), [list[Graded]() for _ in evaluations]
    with contextlib.ExitStack() as locks:
        for evaluation in evaluations:
            locks.enter_context(lock.holding(evaluation.folder))
        for number in range(len(evaluations[0].targets)):
            for (targets, _, folder), found in zip(evaluations, graded, strict=True):
                prefix = f"compared-{digest(targets[number].request)}." if number else ""
                found.append(targets[number].grade(folder / f"{prefix}{RESULTS}"))
        for (_, ks, folder), found in zip(evaluations, graded, strict=True):
            reports.append(make_report(ks, *found))
            write_report(folder, reports[-1])
    return reports


def _targets(options: EvaluateOptions, loader: Loader) -> list[ModelSamples | SampleFile]:
    """Resolve and check the target and the baseline, without loading a model."""
    names = [options.target, *([] if options.compare is None else [options.compare])]
    check_fields(options)
    flags: ModelFlags = options
    models: list[ModelSpec | GgufModel | None] = []  # None for a file of samples
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
    first = next((model for model in models if model), None)
    options.check_used(of_weights=any(isinstance(model, ModelSpec) for model in models), of_sampling=first is not None)
    if options.chat_template_kwargs and all(model is None or model.run for model in models):
        raise UserError(
            f"{template_variables.KWARGS_FLAG} is for models without a run; leave it out to use those of its training"
        )
    settings = choose_settings(options, first.run if first else None)
    if first:
        start_sandbox(settings.data, options.sandbox)
        data = load_evaluation_rows(settings.data, settings.seed, settings.train_seed)
        loader.rows.append(data.eval)
    labels = [model.label if model else json_files.stem(Path(name)) for model, name in zip(models, names, strict=True)]
    labels = labels if len(set(labels)) == len(labels) else names
    targets = [
        ModelSamples(label, model, data, settings, options.sandbox, loader)
        if model
        else read_samples(Path(name).expanduser(), label, options, settings)
        for name, label, model in zip(names, labels, models, strict=True)
    ]
    if unpaired := targets[0].tasks ^ targets[-1].tasks:
        raise UserError(f"{len(unpaired)} tasks have samples on one side only; evaluate both on the same tasks")
    return targets


def _default_folder(name: str, target: ModelSamples | SampleFile) -> Path:
    """Return the folder inside the run of a model, else below outputs/evaluation."""
    evaluation = f"{target.request['task']}-{digest(target.request)}"
    if isinstance(target, ModelSamples):
        model = target.model
        run = model.run_folder if isinstance(model, GgufModel) else run_of(Path(name).expanduser())
        if run:
            return run / "evaluation" / evaluation
    return Path("outputs/evaluation") / f"{name.strip('/.~').replace('/', '--')}-{evaluation}"


class Loader:
    """Loads models to sample from, one at a time. The base of the loaded adapter is not loaded again."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.rows: list[list[Row]] = []
        """The rows of each task. A loaded model has room for all of them."""
        self._model: ModelSpec | GgufModel | None = None
        self._sampler: Sampler | None = None

    def close(self) -> None:
        """Release the loaded model."""
        if self._sampler:
            self._sampler.close()
            self._sampler = None

    def load(
        self, model: ModelSpec | GgufModel, rows: list[Row], settings: EvaluationSettings
    ) -> tuple[Sampler, dict[str, Any]]:
        """Return a sampler of a model, and a record of the prompts of `rows`, versions and hardware."""
        sampler, before = self._sampler, self._model
        if not sampler or not before or model not in (before, dataclasses.replace(before, label=BASE, adapter=None)):
            if sampler:
                sampler.close()  # its memory is free before the next model is loaded
            sampler = self._start(model, settings)
        self._model, self._sampler = model, sampler
        prompts = [chat.render_row(sampler.tokenizer, row) for row in rows]
        described = sampler.describe() if isinstance(sampler, GgufSampler) else {}
        if isinstance(model, ModelSpec):
            described = build.describe(model, self.backend, sampler)
        return sampler, {"prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(), **described}

    def _start(self, model: ModelSpec | GgufModel, settings: EvaluationSettings) -> Sampler:
        """Load a model after the prompts of all tasks are checked. Their length, seed and template are the same."""
        max_tokens = settings.sampling.max_tokens
        if isinstance(model, GgufModel):
            file_sampler = GgufSampler(model, [row for rows in self.rows for row in rows], max_tokens)
            tokenizer = file_sampler.tokenizer
        else:
            tokenizer = build.load_tokenizer(model)
        if model.run is None:  # the template of a run's model has the variables of its training
            template_variables.set_variables(tokenizer, settings.chat_template_kwargs, max_tokens)
        tokens = max(build.check_context(model, tokenizer, rows, max_tokens) for rows in self.rows)
        if isinstance(model, GgufModel):
            return file_sampler
        return build.load_sampler(model, self.backend, tokenizer, tokens, settings.seed)


@dataclass(frozen=True)
class ModelSamples:
    """A model to sample and grade on evaluation rows."""

    label: str
    model: ModelSpec | GgufModel
    data: Data
    settings: EvaluationSettings
    limits: sandbox.Settings
    loader: Loader

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for row in self.data.eval}

    @property
    def min_samples(self) -> int:
        return self.settings.sampling.num_samples

    @functools.cached_property
    def protocol(self) -> Protocol:
        settings, rows = self.settings, len(self.data.eval)
        protocol = make_protocol(settings.data, self.data.record, settings.sampling, rows, settings.seed)
        return protocol.model_copy(update={"limit": settings.limit if settings.limit == rows else None})

    @functools.cached_property
    def request(self) -> Request:
        """Everything that determines the samples and verdicts."""
        settings, protocol = self.settings, self.protocol
        limits = self.limits if settings.task in CODE_TASKS else None
        given = settings.chat_template_kwargs and self.model.run is None
        return {
            "kit": __version__,  # which grades the samples
            **protocol.model_dump(include={"task", "task_sha256", "seed"}),
            **(protocol.sampling.model_dump() if protocol.sampling else {}),
            "rows_sha256": fingerprint(self.data.eval),  # including prompts and worked examples
            "backend": "llama.cpp" if isinstance(self.model, GgufModel) else self.loader.backend,
            "program_seconds": limits and limits.timeout_seconds,
            "program_mb": limits and limits.memory_mb,
            **({"chat_template_kwargs": settings.chat_template_kwargs} if given else {}),
            **self.model.identity,
        }

    def grade(self, path: Path) -> Graded:
        """Sample and grade the results that a file does not have yet, and append them to it."""
        rows, settings = self.data.eval, self.settings
        environment, results = result_files.environment_of(path), finished_samples(path, rows, settings.sampling)
        if environment is None or results is None:
            sampler, environment = self.loader.load(self.model, rows, settings)
            result_files.start(path, self.request, environment)
            title = f"{self.label} on {self.protocol.task}"
            adapted = self.model.adapter is not None or isinstance(self.model, GgufModel)
            results = sample_and_grade(
                path, sampler, rows, settings.task, settings.sampling, settings.seed, title, adapter=adapted
            )
        return Graded(self.label, results, {**self.model.identity, **environment}, self.protocol)
