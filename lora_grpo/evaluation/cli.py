"""`lora-grpo evaluate`: evaluate a model or a file of samples, or compare two of them, and write a report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import __version__, sandbox
from lora_grpo.config import check_fields
from lora_grpo.errors import UserError
from lora_grpo.evaluation import results as result_files
from lora_grpo.evaluation.options import EvaluateOptions, EvaluationSettings, choose_settings
from lora_grpo.evaluation.report import Graded, Protocol, Report, make_protocol, make_report, write_report
from lora_grpo.evaluation.results import RESULTS, Request, digest, task_id
from lora_grpo.evaluation.run import finished_samples, sample_and_grade
from lora_grpo.evaluation.samples_file import SampleFile, read_samples
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelSpec, Overrides, resolve, run_of
from lora_grpo.sampling import GgufModel, GgufSampler, Sampler, build, read_gguf
from lora_grpo.tasks import CODE_TASKS, Data, Row, chat, fingerprint, load_evaluation_rows, start_sandbox


def evaluate_and_report(options: EvaluateOptions) -> Report:
    """Evaluate the targets given by the flags, write and print the report, and return it.

    Raises:
        UserError: a flag, file or row is invalid. Existing results are not changed.
        RunError: out of memory, or programs cannot be run.
    """
    targets = _targets(options)
    fewest = min(target.min_samples for target in targets)
    ks = sorted(set(options.k or (k for k in (1, 10, 100) if k <= fewest)))
    if ks[-1] > fewest:
        raise UserError(f"--k {ks[-1]} exceeds {fewest}, the fewest samples of a task; pass --k {fewest} or less")
    folder = options.output_dir or _default_folder(options.target, targets[0])
    result_files.check_folder(folder, targets[0].request)
    paths = [folder / RESULTS, *(folder / f"compared-{digest(each.request)}.{RESULTS}" for each in targets[1:])]
    with lock.holding(folder):
        report = make_report(ks, *(target.grade(path) for target, path in zip(targets, paths, strict=True)))
        write_report(folder, report)
    report.show()
    if report.evaluated.tasks < report.protocol.rows:
        print(f"only {report.evaluated.tasks} of {report.protocol.rows} tasks have samples", file=sys.stderr)
    print(f"results   {folder / RESULTS}\nreport    {folder / 'report.md'}")
    return report


def _targets(options: EvaluateOptions) -> list[ModelSamples | SampleFile]:
    """Resolve and check the target and the baseline, without loading a model."""
    names = [options.target, *([] if options.compare is None else [options.compare])]
    check_fields(options)
    overrides: Overrides = options
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
            models.append(resolve(name, overrides, bits=options.bits))
        # --base and --revision apply only to the evaluated model.
        overrides = dataclasses.replace(overrides, base=None, revision=None)
    first = next((model for model in models if model), None)
    options.check_used(of_weights=any(isinstance(model, ModelSpec) for model in models), of_sampling=first is not None)
    if options.chat_template_kwargs and all(model is None or model.run for model in models):
        raise UserError(f"{chat.KWARGS_FLAG} is for models without a run; leave it out to use those of its training")
    settings = choose_settings(options, first.run if first else None)
    if first:
        start_sandbox(settings.data, options.sandbox)
        data = load_evaluation_rows(settings.data, settings.seed, settings.train_seed)
        loader = Loader(build.choose_backend(options.backend), settings)
    labels = [model.label if model else json_files.stem(Path(name)) for model, name in zip(models, names, strict=True)]
    labels = labels if len(set(labels)) == len(labels) else names
    targets = [
        ModelSamples(label, model, data, options.sandbox, loader)
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

    def __init__(self, backend: str, settings: EvaluationSettings) -> None:
        self.backend, self.settings = backend, settings
        self._model: ModelSpec | GgufModel | None = None
        self._sampler: Sampler | None = None

    def load(self, model: ModelSpec | GgufModel, rows: list[Row]) -> tuple[Sampler, dict[str, Any]]:
        """Return a sampler of a model, and a record of its prompts, versions and hardware."""
        settings, max_tokens = self.settings, self.settings.sampling.max_tokens
        sampler, before = self._sampler, self._model
        if sampler and before and model != dataclasses.replace(before, label=BASE, adapter=None):
            sampler.close()  # its memory is free before the next model is loaded
            sampler = None
        if isinstance(model, GgufModel):
            file_sampler = GgufSampler(model, rows, max_tokens)
            tokenizer = file_sampler.tokenizer
        else:
            tokenizer = build.load_tokenizer(model)
        if model.run is None:  # the template of a run's model has the variables of its training
            chat.set_variables(tokenizer, settings.chat_template_kwargs, max_tokens)
        tokens = build.check_context(model, tokenizer, rows, max_tokens)
        if isinstance(model, GgufModel):
            sampler, described = file_sampler, file_sampler.describe()
        else:
            sampler = sampler or build.load_sampler(model, self.backend, tokenizer, tokens, settings.seed)
            described = build.describe(model, self.backend, sampler)
        self._model, self._sampler = model, sampler
        prompts = [chat.render_row(tokenizer, row) for row in rows]
        return sampler, {"prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(), **described}


@dataclass(frozen=True)
class ModelSamples:
    """A model to sample and grade on evaluation rows."""

    label: str
    model: ModelSpec | GgufModel
    data: Data
    limits: sandbox.Settings
    loader: Loader

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for row in self.data.eval}

    @property
    def min_samples(self) -> int:
        return self.loader.settings.sampling.num_samples

    @functools.cached_property
    def protocol(self) -> Protocol:
        settings, rows = self.loader.settings, len(self.data.eval)
        protocol = make_protocol(settings.data, self.data.record, settings.sampling, rows, settings.seed)
        return protocol.model_copy(update={"limit": settings.limit if settings.limit == rows else None})

    @functools.cached_property
    def request(self) -> Request:
        """Everything that determines the samples and verdicts."""
        settings, protocol = self.loader.settings, self.protocol
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
        rows, settings = self.data.eval, self.loader.settings
        environment, results = result_files.environment_of(path), finished_samples(path, rows, settings.sampling)
        if environment is None or results is None:
            sampler, environment = self.loader.load(self.model, rows)
            result_files.start(path, self.request, environment)
            adapted = self.model.adapter is not None or isinstance(self.model, GgufModel)
            results = sample_and_grade(
                path, sampler, rows, settings.task, settings.sampling, settings.seed, self.label, adapter=adapted
            )
        return Graded(self.label, results, {**self.model.identity, **environment}, self.protocol)
