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
from lora_grpo.evaluation.measurement import Source
from lora_grpo.evaluation.options import (
    Options,
    Plan,
    check_for_files,
    check_ks,
    check_numbers,
    is_samples_file,
    protocol,
)
from lora_grpo.evaluation.report import Graded, Protocol, Report, Sampling, how_graded, make_report
from lora_grpo.evaluation.results import Result
from lora_grpo.evaluation.results import task_id as harness_id
from lora_grpo.evaluation.run import draw_and_grade, finished_samples
from lora_grpo.evaluation.samples_file import SampleFile
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelSpec, Overrides, files_of, resolve, run_of
from lora_grpo.runs import read_record
from lora_grpo.sampling import Sampler, build
from lora_grpo.tasks import CODE_TASKS, Data, chat, fingerprint, load_evaluation_rows, start_sandbox


@dataclass(frozen=True)
class _Side:
    """One model's graded samples, and what the report says of where they come from."""

    label: str
    results: list[Result]
    told: dict[str, Any]
    file: str


def evaluate_and_report(options: Options) -> Report:
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
    report.show()
    if report.evaluated.tasks < report.protocol.rows:
        missing = f"only {report.evaluated.tasks} of the {report.protocol.rows} tasks of the data have samples"
        print(missing, file=sys.stderr)
    print(f"report    {folder / evaluation_folder.PAGE}")
    return report


def _evaluate(options: Options, folder: Path, asked: Mapping[str, Any]) -> Report:
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
        protocol = _protocol(sources[0], sides[0], seed, plan, data, options)
        protocol = protocol.model_copy(update={"contaminated": _contaminated(sources, sides, plan)})
        report = _report(sources[0], sides, ks, seed, protocol)
        evaluation_folder.finish(folder, asked, report)
    return report


# What is asked


def _sources(options: Options) -> tuple[list[SampleFile | ModelSpec], Plan | None]:
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
    plan = None if first is None else protocol(options, first.run, first.context_tokens)
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


def _ks(options: Options, files: Sequence[SampleFile], plan: Plan | None) -> tuple[int, ...]:
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
        return self.sampler


def _ask(
    folder: Path,
    name: str,
    label: str,
    target: ModelSpec,
    plan: Plan,
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
            folder / name,
            sampler,
            data.eval,
            plan.data.evaluation_task,
            [plan.draws],
            plan.seed,
            label,
            adapter=target.adapter is not None,
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
    source: SampleFile | ModelSpec, sides: Sequence[_Side], ks: tuple[int, ...], seed: int, protocol: Protocol
) -> Report:
    models = [Graded(side.label, side.results, Source(**side.told)) for side in sides]
    return make_report(protocol, ks, *models)


def _protocol(
    source: SampleFile | ModelSpec, side: _Side, seed: int, plan: Plan | None, data: Data | None, options: Options
) -> Protocol:
    if isinstance(source, SampleFile):
        return Protocol(
            task=source.task,
            rows=source.tasks_in_data,
            data_sha256=source.identity["data_sha256"],
            data_source=options.data,
            contaminated=[],
            grading=how_graded(source.task, as_program=True),
            sandbox=side.told["isolation"],
            seed=seed,
        )
    assert plan is not None and data is not None
    return Protocol(
        task=plan.data.evaluation_task,
        rows=len(data.eval),
        data_sha256=data.record["eval"]["sha256"],
        data_source=plan.data.eval,
        left_out_as_trained_on=data.record["left_out_as_trained_on"],
        contaminated=[],
        sampling=Sampling(
            prompt_style=plan.data.prompt_style,
            few_shot=plan.data.few_shot,
            num_samples=plan.draws.num_samples,
            temperature=plan.draws.temperature,
            top_p=plan.draws.top_p,
            max_completion_tokens=plan.draws.max_tokens,
        ),
        grading=how_graded(plan.data.evaluation_task),
        sandbox=side.told["isolation"],
        seed=seed,
    )


def _contaminated(sources: Sequence[SampleFile | ModelSpec], sides: Sequence[_Side], plan: Plan | None) -> list[str]:
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
