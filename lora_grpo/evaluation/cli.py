"""`lora-grpo evaluate`: evaluate a model or a file of samples, or compare two of them, and write a report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.evaluation import folder as evaluation_folder
from lora_grpo.evaluation import samples_file
from lora_grpo.evaluation.folder import RESULTS
from lora_grpo.evaluation.model_samples import Loader, ModelSamples
from lora_grpo.evaluation.options import EvaluateOptions, make_plan
from lora_grpo.evaluation.report import Report, make_report, read_report, write_report
from lora_grpo.evaluation.samples_file import SampleFile
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelSpec, Overrides, resolve, run_of
from lora_grpo.sampling import GgufModel, build, find_program, read_gguf
from lora_grpo.tasks import chat, load_evaluation_rows, start_sandbox

Side = ModelSamples | SampleFile


def evaluate_and_report(options: EvaluateOptions) -> Report:
    """Evaluate the targets given by the flags, write and print the report, and return it.

    Raises:
        UserError: a flag, file or row is invalid. Existing results are not changed.
        RunError: out of memory, or programs cannot be run.
    """
    if options.explain:
        if report := _stored_report(options):
            report.show()
            report.show_gain()
            return report
        options = dataclasses.replace(options, compare=options.compare or BASE)
    sides = _sides(options)
    ks = _choose_ks(options, min(side.fewest for side in sides))
    request = sides[0].request
    default = _default_folder(options.target, sides[0])
    folder = options.output_dir or default
    evaluation_folder.check(folder, request, overwrite=options.overwrite)
    names = [RESULTS, *(f"compared-{evaluation_folder.digest(side.request)}.{RESULTS}" for side in sides[1:])]
    with lock.holding(folder):
        for side, name in zip(sides, names, strict=True):
            evaluation_folder.copy_results(folder / name, side.request, default.parent)
        report = make_report(ks, *(side.grade(folder, name) for side, name in zip(sides, names, strict=True)))
        write_report(folder, report)
    report.show()
    if options.explain:
        report.show_gain()
    if report.evaluated.tasks < report.protocol.rows:
        print(f"only {report.evaluated.tasks} of {report.protocol.rows} tasks have samples", file=sys.stderr)
    print(f"results   {folder / RESULTS}\nreport    {folder / 'report.md'}")
    run = _run_of_gguf(sides[0])
    if run and folder.parent == run / "evaluation" and not options.limit:
        print(f"page      {command('report', run)}  # shows what each type costs")
    return report


def _stored_report(options: EvaluateOptions) -> Report | None:
    """Return the report of a finished run, or None if flags ask for other samples."""
    run = run_of(Path(options.source or "").expanduser())
    if run is None or options != EvaluateOptions(source=options.source, explain=True):
        return None
    report = read_report(run / "evaluation")
    if report is None:
        raise UserError(f"{run / 'evaluation'} has no report.json; run the recipe with --resume to evaluate")
    if report.gain is None:
        raise UserError(f"the report of the run in {run} is of an older version; pass --num-samples 4 for new samples")
    return report


def _sides(options: EvaluateOptions) -> list[Side]:
    """Resolve and check the target and the comparison target, without loading a model."""
    names = [options.target, *([] if options.compare is None else [options.compare])]
    if "" in names:
        raise UserError("the name of a model is empty; pass a run, an adapter, a model, a Hub id or a file of samples")
    if len(set(names)) < len(names):
        raise UserError(f"--compare {options.compare} is the evaluated model itself; pass another model or file")
    options.check(samples_only=all(map(_is_samples_file, names)))
    models = _resolve_models(options, names)
    if options.chat_template_kwargs and all(model is None or model.run for model in models):
        raise UserError(
            f"{chat.KWARGS_FLAG} is for models without a run; a run is evaluated with those of its training; leave it "
            "out"
        )
    labels = [model.label if model else json_files.stem(Path(name)) for model, name in zip(models, names, strict=True)]
    labels = labels if len(set(labels)) == len(labels) else names
    first = next((model for model in models if model), None)
    plan = make_plan(options, first.run if first else None)
    if first:
        backend = build.choose_backend(options.backend)
        start_sandbox(plan.data, options.sandbox)
        data = load_evaluation_rows(plan.data, plan.seed, trained_seed=plan.trained_seed)
        loader = Loader(backend, plan.seed, is_auto=options.backend == "auto")
    sides: list[Side] = []
    for name, label, model in zip(names, labels, models, strict=True):
        if model:
            sides.append(ModelSamples(label, model, plan, data, options.sandbox, loader))
        else:
            sides.append(samples_file.read(Path(name).expanduser(), label, options, plan))
    if unpaired := sides[0].tasks ^ sides[-1].tasks:
        raise UserError(f"{len(unpaired)} tasks have samples on one side only; evaluate both on the same tasks")
    return sides


def _resolve_models(options: EvaluateOptions, names: Sequence[str]) -> list[ModelSpec | GgufModel | None]:
    """Return the model spec of each name, or None for a file of samples."""
    overrides = Overrides(options.bits, options.base, options.revision, options.trust_remote_code)
    models: list[ModelSpec | GgufModel | None] = []
    for name in names:
        if name == BASE and models:
            if models[0] is None and options.explain:
                raise UserError(
                    f"--explain is for a run or an adapter, and {names[0]} is a file of samples; pass the run, or a "
                    "second file of samples with --compare"
                )
            if models[0] is None:
                raise UserError("--compare base means the base below an adapter; pass another file of samples")
            models.append(models[0].without_adapter())
        elif _is_gguf(name):
            if overrides.base or overrides.revision:
                raise UserError(f"--base and --revision do not apply to {name}, a GGUF file; leave them out")
            models.append(_gguf(Path(name).expanduser()))
        else:
            models.append(None if _is_samples_file(name) else resolve(name, overrides))
        # --base and --revision apply only to the evaluated model.
        overrides = dataclasses.replace(overrides, base=None, revision=None)
    if all(isinstance(model, GgufModel) for model in models):
        for given, flag in ((options.bits, "--bits"), (options.backend != "auto", "--backend")):
            if given:
                raise UserError(f"{flag} does not apply to a GGUF file, which llama.cpp runs as it is; leave it out")
    return models


def _gguf(path: Path) -> GgufModel:
    file = read_gguf(path)
    find_program(path)  # also if all samples are there, to say so before anything is loaded
    return file


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _is_samples_file(name: str) -> bool:
    path = Path(name).expanduser()
    if _is_gguf(name):
        return False
    return path.is_file() or path.name.endswith((".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz"))


def _choose_ks(options: EvaluateOptions, fewest: int) -> list[int]:
    """Return the values of k for pass@k: the requested ones, or the default ones that have enough samples."""
    ks = sorted(set(options.k or (k for k in (1, 10, 100) if k <= fewest)))
    if ks[-1] > fewest:
        raise UserError(f"--k {ks[-1]} exceeds {fewest}, the fewest samples of a task; pass --k {fewest} or less")
    return ks


def _run_of_gguf(side: Side) -> Path | None:
    return side.model.run_folder if isinstance(side, ModelSamples) and isinstance(side.model, GgufModel) else None


def _default_folder(target: str, side: Side) -> Path:
    given = Path(target).expanduser()
    name = f"{side.request['task']}-{evaluation_folder.digest(side.request)}"
    if isinstance(side, ModelSamples) and (run := _run_of_gguf(side) or run_of(given)):
        return run / "evaluation" / name
    stem = json_files.stem(given) if isinstance(side, SampleFile) else target.strip("/.~").replace("/", "--")
    return Path("outputs") / "evaluation" / f"{stem}-{name}"
