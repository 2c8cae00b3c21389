"""`lora-grpo evaluate`: evaluate a model or a file of samples, or compare two of them, and write a report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.evaluation.model_samples import Loader, ModelSamples
from lora_grpo.evaluation.options import EvaluateOptions, choose_settings
from lora_grpo.evaluation.report import Report, make_report, write_report
from lora_grpo.evaluation.results import RESULTS, check_folder, copy_results, digest
from lora_grpo.evaluation.samples_file import SampleFile, read_samples
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelSpec, Overrides, resolve, run_of
from lora_grpo.sampling import GgufModel, build, find_program, read_gguf
from lora_grpo.tasks import chat, load_evaluation_rows, start_sandbox


def evaluate_and_report(options: EvaluateOptions) -> Report:
    """Evaluate the targets given by the flags, write and print the report, and return it.

    Raises:
        UserError: a flag, file or row is invalid. Existing results are not changed.
        RunError: out of memory, or programs cannot be run.
    """
    targets = _targets(options)
    ks = _choose_ks(options, min(target.min_samples for target in targets))
    run_of_file = _run_of_gguf(targets[0])
    default = _default_folder(options.target, targets[0], run_of_file)
    folder = options.output_dir or default
    check_folder(folder, targets[0].request, overwrite=options.overwrite)
    paths = [folder / RESULTS, *(folder / f"compared-{digest(each.request)}.{RESULTS}" for each in targets[1:])]
    with lock.holding(folder):
        for target, path in zip(targets, paths, strict=True):
            copy_results(path, target.request, default.parent)
        report = make_report(ks, *(target.grade(path) for target, path in zip(targets, paths, strict=True)))
        write_report(folder, report)
    report.show()
    if report.evaluated.tasks < report.protocol.rows:
        print(f"only {report.evaluated.tasks} of {report.protocol.rows} tasks have samples", file=sys.stderr)
    print(f"results   {folder / RESULTS}\nreport    {folder / 'report.md'}")
    if run_of_file and folder.parent == run_of_file / "evaluation" and not options.limit:
        print(f"page      {command('report', run_of_file)}  # shows what each type costs")
    return report


def _targets(options: EvaluateOptions) -> list[ModelSamples | SampleFile]:
    """Resolve and check the target and the one to compare with, without loading a model."""
    names = [options.target, *([] if options.compare is None else [options.compare])]
    if "" in names:
        raise UserError("the name of a model is empty; pass a run, an adapter, a model, a Hub id or a file of samples")
    are_files = list(map(_is_samples_file, names))
    of_weights = any(not is_file and not _is_gguf(name) for name, is_file in zip(names, are_files, strict=True))
    options.check(of_weights=of_weights, of_sampling=not all(are_files))
    models = _resolve_models(options, names)
    if options.chat_template_kwargs and all(model is None or model.run for model in models):
        raise UserError(
            f"{chat.KWARGS_FLAG} is for models without a run; a run is evaluated with those of its training; leave it "
            "out"
        )
    labels = [model.label if model else json_files.stem(Path(name)) for model, name in zip(models, names, strict=True)]
    labels = labels if len(set(labels)) == len(labels) else names
    first = next((model for model in models if model), None)
    settings = choose_settings(options, first.run if first else None)
    if first:
        start_sandbox(settings.data, options.sandbox)
        data = load_evaluation_rows(settings.data, settings.seed, trained_seed=settings.trained_seed)
        loader = Loader(build.choose_backend(options.backend), settings, is_auto=options.backend == "auto")
    targets: list[ModelSamples | SampleFile] = []
    for name, label, model in zip(names, labels, models, strict=True):
        if model:
            targets.append(ModelSamples(label, model, data, options.sandbox, loader))
        else:
            targets.append(read_samples(Path(name).expanduser(), label, options, settings))
    if unpaired := targets[0].tasks ^ targets[-1].tasks:
        raise UserError(f"{len(unpaired)} tasks have samples on one side only; evaluate both on the same tasks")
    return targets


def _resolve_models(options: EvaluateOptions, names: Sequence[str]) -> list[ModelSpec | GgufModel | None]:
    """Return the model spec of each name, or None for a file of samples."""
    overrides = Overrides(options.bits, options.base, options.revision, options.trust_remote_code)
    models: list[ModelSpec | GgufModel | None] = []
    for name in names:
        if name == BASE and models:
            if models[0] is None:
                raise UserError("--compare base means the base below an adapter; pass another file of samples")
            models.append(models[0].without_adapter())
        elif _is_gguf(name):
            models.append(read_gguf(Path(name).expanduser()))
            find_program(Path(name).expanduser())  # refused now, before anything is loaded, if llama.cpp is missing
        else:
            models.append(None if _is_samples_file(name) else resolve(name, overrides))
        # --base and --revision apply only to the evaluated model.
        overrides = dataclasses.replace(overrides, base=None, revision=None)
    return models


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _is_samples_file(name: str) -> bool:
    path = Path(name).expanduser()
    return not _is_gguf(name) and (path.is_file() or path.name.endswith((".jsonl", ".json", ".gz")))


def _choose_ks(options: EvaluateOptions, min_samples: int) -> list[int]:
    """Return the values of k for pass@k: the requested ones, or the default ones that have enough samples."""
    ks = sorted(set(options.k or (k for k in (1, 10, 100) if k <= min_samples)))
    if ks[-1] > min_samples:
        fix = f"pass --k {min_samples} or less"
        raise UserError(f"--k {ks[-1]} exceeds {min_samples}, the fewest samples of a task; {fix}")
    return ks


def _run_of_gguf(target: ModelSamples | SampleFile) -> Path | None:
    return target.model.run_folder if isinstance(target, ModelSamples) and isinstance(target.model, GgufModel) else None


def _default_folder(name: str, target: ModelSamples | SampleFile, run_of_file: Path | None) -> Path:
    """Return the folder inside the run of a model, else below outputs/evaluation."""
    given, evaluation = Path(name).expanduser(), f"{target.request['task']}-{digest(target.request)}"
    if isinstance(target, SampleFile):
        return Path("outputs/evaluation") / f"{json_files.stem(given)}-{evaluation}"
    if run := run_of_file or run_of(given):
        return run / "evaluation" / evaluation
    return Path("outputs/evaluation") / f"{name.strip('/.~').replace('/', '--')}-{evaluation}"
