"""`scripts/evaluate.py`: a model, or two on the same rows, asked, graded and reported; or files of samples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import __version__, sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation import evaluation_folder, samples_file
from lora_grpo.evaluation.comparison import compare, task_changes
from lora_grpo.evaluation.options import (
    Options,
    Protocol,
    check_for_files,
    check_ks,
    check_numbers,
    is_samples_file,
    protocol,
)
from lora_grpo.evaluation.report import Page, measure
from lora_grpo.evaluation.results import Result
from lora_grpo.evaluation.results import task_id as harness_id
from lora_grpo.evaluation.run import draw_and_grade, finished_samples
from lora_grpo.evaluation.samples_file import SampleFile
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelSpec, Overrides, context_tokens, files_of, resolve, run_of
from lora_grpo.runs import read_record
from lora_grpo.sampling import Sampler, build
from lora_grpo.tasks import CODE_TASKS, Data, chat, fingerprint, load_evaluation_rows, start_sandbox

_READ_ANSWER = "one number on the line of the last ####, \\boxed{} or <answer>, compared in value (`robust`)"
_READ_PROGRAM = "the last code that defines the function, after its prompt, against the unit tests in the sandbox"
_EXACT_COMPLETION = "the completion as it stands, after its prompt, against the unit tests in the sandbox"


@dataclass(frozen=True)
class _Side:
    """One model's graded samples, and what the report says of where they come from."""

    label: str
    results: list[Result]
    told: dict[str, Any]
    file: str


def evaluate_and_report(options: Options) -> dict[str, Any]:
    """Evaluate what the flags name, write and print the report, and return it.

    Whatever is finished is not done again: samples and verdicts are kept as they come, and a command that asks the same
    as the one before is answered from its report.

    Raises:
        UserError: a mistake in flags, files or data. What is in the folder is as it was then.
        RunError: memory did not suffice, or programs cannot be run.
    """
    check_numbers(options)
    sandbox.check_settings(options.sandbox)
    folder = _folder(options)
    asked = {
        "kit": __version__,
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "output_dir"},
        "files": evaluation_folder.stamp(_files(options)),
    }
    report = evaluation_folder.answer(folder, asked) or _evaluate(options, folder, asked)
    _page(report).show()
    tasks, total = report["tasks"], report["tasks_in_data"]
    if tasks < total:
        print(f"only {tasks} of the {total} tasks of the data have samples", file=sys.stderr)
    if report["isolation"]:
        print(report["isolation"])
    print(
        f"{Path(report['files'][0]).stem:9} {folder / report['files'][0]}\nreport    {folder / evaluation_folder.PAGE}"
    )
    return report


def _evaluate(options: Options, folder: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    sources, plan = _sources(options)
    data, backend = None, ""
    if plan is not None:
        backend = build.choose_backend(options.backend)
        start_sandbox(plan.data, options.sandbox)
        data = load_evaluation_rows(plan.data, plan.seed, trained_seed=plan.trained_seed)
    _check_tasks(sources, data)
    seed = plan.seed if plan else options.seed or 0
    ks = _ks(options, [source for source in sources if isinstance(source, SampleFile)], plan)
    labels = _labels(options, sources)
    names = [f"{'compared.' * place}{_file_name(source)}" for place, source in enumerate(sources)]
    evaluation_folder.facts(folder, names[0], {})  # a folder of something else is refused before it is touched
    with lock.holding(folder):
        evaluation_folder.settle(folder)
        for name in evaluation_folder.edited(folder):
            print(f"{folder / name} is not as it was left; the report is of what it holds now", file=sys.stderr)
        sides, samplers = [], _Samplers()
        for name, label, source in zip(names, labels, sources, strict=True):
            if isinstance(source, SampleFile):
                sides.append(_grade(folder, name, label, source, options.sandbox))
            else:
                assert plan is not None and data is not None
                sides.append(_ask(folder, name, label, source, plan, data, backend, samplers))
        report = _report(sources[0], sides, ks, seed, plan, data)
        report["protocol"]["contaminated"] = _contaminated(sources, sides, plan)
        evaluation_folder.finish(folder, asked, report, _page(report).markdown())
    return report


# What is asked


def _sources(options: Options) -> tuple[list[SampleFile | ModelSpec], Protocol | None]:
    """Return what is evaluated, what it is compared with, and how models among them are asked."""
    overrides = Overrides(options.bits, options.base, options.revision, options.trust_remote_code)
    names = [options.named] if options.compare is None else [options.named, options.compare]
    found: list[ModelSpec | None] = []
    for place, name in enumerate(names):
        if place == 1 and name == BASE:
            if found[0] is None:
                raise UserError("--compare base means the base below an adapter; name another file of samples")
            found.append(found[0].without_adapter())
        else:
            found.append(None if is_samples_file(name) else resolve(name, overrides))
        # What is said of one model's base and revision is not meant for the other's.
        overrides = dataclasses.replace(overrides, base=None, revision=None)
    first = next((target for target in found if target is not None), None)
    if first is None:
        check_for_files(options)
    plan = None if first is None else protocol(options, first.run, context_tokens(first))
    task = options.task if plan is None else plan.data.evaluation_task
    if task is None:
        raise UserError("--task is missing; say what the samples answer")
    data = options.data if plan is None else plan.data.eval
    sources = [
        target or samples_file.read(Path(name).expanduser(), task, data, options.style, options.sandbox)
        for name, target in zip(names, found, strict=True)
    ]
    return sources, plan


def _check_tasks(sources: Sequence[SampleFile | ModelSpec], data: Data | None) -> None:
    """Refuse to compare answers to different tasks, before anything is asked or moved."""
    tasks = []
    for source in sources:
        rows = (
            [sample.row for sample in source.samples] if isinstance(source, SampleFile) else data.eval if data else []
        )
        tasks.append({harness_id(row) for row in rows})
    lost = len(tasks[0] ^ tasks[-1])
    if lost:
        raise UserError(f"{lost} tasks have samples on one side alone; evaluate both on the same tasks")


def _labels(options: Options, sources: Sequence[SampleFile | ModelSpec]) -> list[str]:
    """Return what tables call the sides, never the same for both."""
    names = [options.named, options.compare or ""]
    labels = [
        source.label if isinstance(source, ModelSpec) else json_files.stem(Path(name))
        for source, name in zip(sources, names, strict=False)
    ]
    if len(labels) == 2 and names[0] == names[1]:
        raise UserError(f"--compare {names[1]} is what is evaluated; name another model or file")
    return labels if len(set(labels)) == len(labels) else [*names]


def _file_name(source: SampleFile | ModelSpec) -> str:
    return "samples.jsonl" if isinstance(source, ModelSpec) else "results.jsonl"


def _ks(options: Options, files: Sequence[SampleFile], plan: Protocol | None) -> tuple[int, ...]:
    """Return the k of pass@k: those asked for, or those of the usual ones that there are samples for."""
    if plan:
        ks: tuple[int, ...] = plan.ks
    elif options.k is None:
        ks = tuple(k for k in (1, 10, 100) if all(k <= file.fewest for file in files))
    else:
        ks = options.k
    check_ks(ks)
    for file in files:
        if max(ks) > file.fewest:
            raise UserError(
                f"--k {max(ks)} exceeds {file.fewest}, the fewest samples of a task; pass --k {file.fewest} or less"
            )
    return tuple(sorted(set(ks)))


def _folder(options: Options) -> Path:
    """Return where samples and report go."""
    if options.output_dir is not None:
        return options.output_dir
    name = options.named
    if is_samples_file(name):
        return Path("outputs") / "evaluation" / f"{json_files.stem(Path(name))}-{options.task}"
    given = Path(name).expanduser()
    run = run_of(given)
    task = options.task
    if run is not None and task is None:
        asked = read_record(run)["config"]["data"]
        task = asked["eval_task"] or asked["task"]
    if run == given:
        return given / "evaluation" / str(task)
    return Path("outputs") / "evaluation" / f"{name.strip('/.~').replace('/', '--')}-{task}"


def _files(options: Options) -> list[Path]:
    """Return the files that an answer depends on."""
    named = [name for name in (options.named, options.compare) if name not in (None, BASE)]
    paths = [Path(name).expanduser() for name in (options.data, options.few_shot_data) if name]
    for name in map(str, named):
        paths += [Path(name).expanduser()] if is_samples_file(name) else files_of(name, options.base)
    return paths


# What is answered


@dataclass
class _Samplers:
    """The loaded model, which the side after it may share."""

    target: ModelSpec | None = None
    sampler: Sampler | None = None
    sequence_tokens: int = 0

    def of(self, target: ModelSpec, backend: str, tokenizer: Any, sequence_tokens: int, seed: int) -> Sampler:
        """Return a sampler of this target, ready to draw: the one at hand if it has the same base."""
        at_hand = self.target
        shared = (
            at_hand is not None
            and (at_hand.base, at_hand.tokenizer) == (target.base, target.tokenizer)
            and target.adapter in (at_hand.adapter, None)
            and self.sequence_tokens >= sequence_tokens
        )
        if not shared or self.sampler is None:
            if self.sampler is not None:
                self.sampler.close()
            self.sampler = None  # before the next model takes its memory
            self.sampler = build.load_sampler(target, backend, tokenizer, sequence_tokens, seed)
            self.target, self.sequence_tokens = target, sequence_tokens
        if self.target is not None and self.target.adapter is not None:
            self.sampler.refresh(adapter=target.adapter is not None)
        return self.sampler


def _ask(
    folder: Path,
    name: str,
    label: str,
    target: ModelSpec,
    plan: Protocol,
    data: Data,
    backend: str,
    samplers: _Samplers,
) -> _Side:
    """Draw and grade what is not there yet."""
    identity = {
        "rows": len(data.eval),
        "asked_sha256": fingerprint(data.eval),  # rows and messages, worked examples among them
        **plan.told(),
        **target.identity,
        "backend": backend,
    }
    facts = evaluation_folder.facts(folder, name, identity)
    results = finished_samples(folder / name, data.eval, [plan.draws]) if facts is not None else None
    if facts is None or results is None:
        tokenizer = build.load_tokenizer(target)
        room = build.check_context(target, tokenizer, data.eval, plan.draws.max_tokens)
        sampler = samplers.of(target, backend, tokenizer, room, plan.seed)
        prompts = [chat.render_row(tokenizer, row) for row in data.eval]
        facts = {
            "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            **build.describe(target, backend, sampler),
            "isolation": data.record["sandbox"],
        }
        facts = evaluation_folder.begin(folder, name, identity, facts)
        results = draw_and_grade(
            folder / name, sampler, data.eval, plan.data.evaluation_task, [plan.draws], plan.seed, label
        )
    return _Side(label, results, {**target.identity, **facts}, name)


def _grade(folder: Path, name: str, label: str, file: SampleFile, limits: sandbox.Settings) -> _Side:
    """Grade what is not graded yet of a file of samples."""
    facts = evaluation_folder.facts(folder, name, file.identity)
    results = json_files.read_finished_lines(folder / name) if facts is not None else []
    if facts is None or len(results) != len(file.samples):
        isolation = sandbox.start(limits) if file.task in CODE_TASKS else None
        facts = evaluation_folder.begin(folder, name, file.identity, {"isolation": isolation})
        results = samples_file.grade(file, folder / name)
    return _Side(label, file.results_by_task(results), {**file.identity, **facts}, name)


# What is reported


def _report(
    source: SampleFile | ModelSpec,
    sides: Sequence[_Side],
    ks: tuple[int, ...],
    seed: int,
    plan: Protocol | None,
    data: Data | None,
) -> dict[str, Any]:
    side, *others = sides
    measured = {each.label: measure(each.results, ks, seed) for each in sides}
    task = source.task if isinstance(source, SampleFile) else plan.data.evaluation_task if plan else ""
    if isinstance(source, ModelSpec):
        extraction = _READ_PROGRAM if task in CODE_TASKS else _READ_ANSWER
    else:
        extraction = _EXACT_COMPLETION if task in CODE_TASKS else _READ_ANSWER
    told: dict[str, Any] = {"task": task, "extraction": extraction, "seed": seed, "kit": __version__}
    if plan and data:
        told |= {"rows": len(data.eval), "data_sha256": data.record["eval"]["sha256"], **plan.told()}
        told["left_out_as_trained_on"] = data.record["left_out_as_trained_on"]
    report: dict[str, Any] = {
        **measured[side.label],
        "label": side.label,
        "task": task,
        "tasks_in_data": source.tasks_in_data if isinstance(source, SampleFile) else len(data.eval) if data else 0,
        "isolation": side.told["isolation"],
        "files": [each.file for each in sides],
        "protocol": told | {"models": {each.label: each.told for each in sides}},
        "compared_with": None,
    }
    for other in others:
        report["compared_with"] = {"label": other.label, **measured[other.label]}
        report["table"] = compare(other.results, side.results, ks, seed)
        report |= task_changes(other.results, side.results)
    return report


def _contaminated(
    sources: Sequence[SampleFile | ModelSpec], sides: Sequence[_Side], plan: Protocol | None
) -> list[str]:
    """Return the sides whose run was trained on rows of this benchmark that are asked here, and say so."""
    found = []
    for source, side in zip(sources, sides, strict=True):
        if plan is None or not isinstance(source, ModelSpec) or source.run is None or source.adapter is None:
            continue
        trained_on = source.run["data"].get("trained_on_benchmark")
        left_out = plan.trained_seed is not None and source is sources[0]
        if trained_on == plan.data.evaluation_task and not left_out:
            found.append(side.label)
            print(f"CONTAMINATED: {side.label} was trained on {trained_on}; its score says nothing", file=sys.stderr)
    return found


def _page(report: Mapping[str, Any]) -> Page:
    """Return a report, as it is written or read back, ready to be shown."""
    told = report["protocol"]
    title = f"{report['task']}: {report['samples']} samples of {report['tasks']} tasks"
    if "temperature" in told:
        how = f"temperature {told['temperature']:g}, top-p {told['top_p']:g}" if told["temperature"] else "greedy"
        title += f", {how}, {told['prompt_style']} style, {told['few_shot']} shots"
    if told.get("left_out_as_trained_on"):
        lost = told["left_out_as_trained_on"]
        title += f"; {lost} problems of this benchmark were trained on and left out: not comparable"
    if told["contaminated"]:
        title += f"; CONTAMINATED: {', '.join(told['contaminated'])} was trained on this benchmark"
    other = report["compared_with"]
    sides = {other["label"]: other} if other else {}
    sides[report["label"]] = report
    moved = {word: report[word] for word in ("fixed", "regressed")} if other else None
    return Page(title, sides, told, report.get("table", ()), moved)
