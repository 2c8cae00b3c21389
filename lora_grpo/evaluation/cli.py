"""`scripts/evaluate.py`: evaluate a model or a file of samples, or compare two of them, and write a report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation import folder as evaluation_folder
from lora_grpo.evaluation import samples_file
from lora_grpo.evaluation.folder import RESULTS, Request
from lora_grpo.evaluation.measurement import Source
from lora_grpo.evaluation.options import EvaluateOptions, Plan, make_plan
from lora_grpo.evaluation.report import Graded, Protocol, Report, Sampling, how_graded, make_report, write_report
from lora_grpo.evaluation.results import task_id
from lora_grpo.evaluation.run import finished_samples, sample_and_grade
from lora_grpo.evaluation.samples_file import SampleFile
from lora_grpo.files import json_files, lock
from lora_grpo.models import BASE, ModelSpec, Overrides, resolve, run_of
from lora_grpo.sampling import Sampler, build
from lora_grpo.tasks import CODE_TASKS, Data, chat, fingerprint, load_evaluation_rows, start_sandbox


def evaluate_and_report(options: EvaluateOptions) -> Report:
    """Evaluate the targets given by the flags, write and print the report, and return it.

    Finished samples and verdicts are kept. A killed evaluation resumes, and a finished one returns immediately.

    Raises:
        UserError: a flag, file or row is invalid. Existing results are not changed.
        RunError: out of memory, or programs cannot be run.
    """
    options.check()
    sides, plan = _sides(options)
    ks = _choose_ks(options, sides, plan)
    request = sides[0].request
    folder = options.output_dir or _default_folder(options, sides[0])
    evaluation_folder.check(folder, request, overwrite=options.overwrite)
    names = [RESULTS, *(f"compared-{evaluation_folder.digest(side.request)}.{RESULTS}" for side in sides[1:])]
    with lock.holding(folder):
        graded = [side.grade(folder, name) for side, name in zip(sides, names, strict=True)]
        contaminated = [side.label for side in sides if isinstance(side, _ModelSide) and side.is_contaminated]
        report = make_report(sides[0].protocol(contaminated), ks, *graded)
        write_report(folder, report)
    report.show()
    if report.evaluated.tasks < report.protocol.rows:
        print(f"only {report.evaluated.tasks} of {report.protocol.rows} tasks have samples", file=sys.stderr)
    print(f"results   {folder / RESULTS}\nreport    {folder / 'report.md'}")
    return report


@dataclass
class _FileSide:
    """A file of samples to grade."""

    label: str
    file: SampleFile
    data_source: str | None
    limits: sandbox.Settings
    seed: int
    isolation: str | None = None
    """How programs are isolated; set when grading starts."""

    @property
    def request(self) -> Request:
        return self.file.identity

    @property
    def task(self) -> str:
        return self.file.task

    @property
    def tasks(self) -> set[str]:
        return {task_id(sample.row) for sample in self.file.samples}

    def grade(self, folder: Path, name: str) -> Graded:
        """Grade the samples that have no verdict yet."""
        environment = evaluation_folder.environment(folder, name)
        results = json_files.read_finished_lines(folder / name) if environment else []
        if environment is None or len(results) != len(self.file.samples):
            isolation = sandbox.start(self.limits) if self.task in CODE_TASKS else None
            environment = evaluation_folder.start(folder, name, self.request, {"isolation": isolation})
            results = samples_file.grade(self.file, folder / name)
        self.isolation = environment["isolation"]
        return Graded(self.label, self.file.results_by_task(results), Source(**self.request))

    def protocol(self, contaminated: list[str]) -> Protocol:
        return Protocol(
            task=self.task,
            rows=self.file.tasks_in_data,
            data_sha256=self.request["data_sha256"],
            data_source=self.data_source,
            contaminated=contaminated,
            grading=how_graded(self.task, as_program=True),
            sandbox=self.isolation,
            seed=self.seed,
        )


@dataclass
class _Loaded:
    """The model in memory. Its base can be sampled without loading it again."""

    model: ModelSpec | None = None
    sampler: Sampler | None = None


@dataclass
class _ModelSide:
    """A model to sample."""

    label: str
    model: ModelSpec
    plan: Plan
    data: Data
    backend: str
    loaded: _Loaded
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        rows = self.data.eval  # including prompts and worked examples
        self.request = {"rows_sha256": fingerprint(rows), **self.plan.request, **self.model.identity}
        self.request["backend"] = self.backend

    @property
    def task(self) -> str:
        return self.plan.task

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for row in self.data.eval}

    @property
    def is_contaminated(self) -> bool:
        """Whether the evaluation includes benchmark rows that the model's run trained on."""
        run = self.model.run if self.model.adapter else None
        if run is None or run["data"].get("trained_on_benchmark") != self.task:
            return False
        return self.plan.trained_seed is None or run is not self.plan.run  # otherwise those rows are left out

    def grade(self, folder: Path, name: str) -> Graded:
        """Sample and grade the missing results."""
        rows, sampling = self.data.eval, self.plan.sampling
        environment = evaluation_folder.environment(folder, name)
        results = finished_samples(folder / name, rows, [sampling]) if environment else None
        if environment is None or results is None:
            sampler, found = self._load()
            environment = evaluation_folder.start(folder, name, self.request, found)
            adapter = self.model.adapter is not None
            results = sample_and_grade(
                folder / name, sampler, rows, self.task, [sampling], self.plan.seed, self.label, adapter=adapter
            )
        return Graded(self.label, results, Source(**self.model.identity, **environment))

    def protocol(self, contaminated: list[str]) -> Protocol:
        plan, record = self.plan, self.data.record
        return Protocol(
            task=plan.task,
            rows=len(self.data.eval),
            data_sha256=record["eval"]["sha256"],
            data_source=plan.data.eval,
            left_out_as_trained_on=record["left_out_as_trained_on"],
            contaminated=contaminated,
            sampling=Sampling(
                prompt_style=plan.data.prompt_style,
                few_shot=plan.data.few_shot,
                num_samples=plan.sampling.num_samples,
                temperature=plan.sampling.temperature,
                top_p=plan.sampling.top_p,
                max_completion_tokens=plan.sampling.max_tokens,
            ),
            grading=how_graded(plan.task),
            sandbox=record["sandbox"],
            seed=plan.seed,
        )

    def _load(self) -> tuple[Sampler, dict[str, object]]:
        """Return a sampler, and a record of its prompts, versions and hardware."""
        model, loaded = self.model, self.loaded
        tokenizer = build.load_tokenizer(model)
        sequence_tokens = build.check_context(model, tokenizer, self.data.eval, self.plan.sampling.max_tokens)
        held = loaded.model
        same_base = held is not None and (held.base, held.tokenizer) == (model.base, model.tokenizer)
        if loaded.sampler is None or not same_base or (held and model.adapter not in (held.adapter, None)):
            if loaded.sampler:
                loaded.sampler.close()
            loaded.sampler = None  # frees its memory before the next model is loaded
            loaded.sampler = build.load_sampler(model, self.backend, tokenizer, sequence_tokens, self.plan.seed)
            loaded.model = model
        prompts = [chat.render_row(tokenizer, row) for row in self.data.eval]
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        return loaded.sampler, {"prompts_sha256": digest, **build.describe(model, self.backend, loaded.sampler)}


def _sides(options: EvaluateOptions) -> tuple[list[_FileSide | _ModelSide], Plan | None]:
    """Resolve and check the target and the comparison target, without loading a model."""
    names = [options.target, *([options.compare] if options.compare else [])]
    if len(set(names)) < len(names):
        raise UserError(f"--compare {options.compare} is the evaluated model itself; pass another model or file")
    models = _resolve_models(options, names)
    labels = [model.label if model else json_files.stem(Path(name)) for model, name in zip(models, names, strict=True)]
    labels = labels if len(set(labels)) == len(labels) else names
    first, plan, data, backend = next((model for model in models if model), None), None, None, ""
    if first:
        plan = make_plan(options, first.run, first.context_tokens)
        backend = build.choose_backend(options.backend)
        start_sandbox(plan.data, plan.limits)
        data = load_evaluation_rows(plan.data, plan.seed, trained_seed=plan.trained_seed)
    else:
        options.check_for_files()
    task = plan.task if plan else options.task
    if task is None:
        raise UserError("--task is missing; pass the task that the samples answer")
    source, seed = (plan.data.eval, plan.seed) if plan else (options.data, options.seed or 0)
    loaded = _Loaded()
    sides: list[_FileSide | _ModelSide] = []
    for name, label, model in zip(names, labels, models, strict=True):
        if model and plan and data:
            sides.append(_ModelSide(label, model, plan, data, backend, loaded))
        else:
            file = samples_file.read(Path(name).expanduser(), task, source, options.style, options.sandbox)
            sides.append(_FileSide(label, file, source, options.sandbox, seed))
    if unpaired := sides[0].tasks ^ sides[-1].tasks:
        raise UserError(f"{len(unpaired)} tasks have samples on one side only; evaluate both on the same tasks")
    return sides, plan


def _resolve_models(options: EvaluateOptions, names: list[str]) -> list[ModelSpec | None]:
    """Return the model spec of each name, or None for a file of samples."""
    overrides = Overrides(options.bits, options.base, options.revision, options.trust_remote_code)
    first = None if _is_samples_file(names[0]) else resolve(names[0], overrides)
    if len(names) == 1:
        return [first]
    if names[1] != BASE:
        # --base and --revision apply only to the evaluated model.
        overrides = dataclasses.replace(overrides, base=None, revision=None)
        return [first, None if _is_samples_file(names[1]) else resolve(names[1], overrides)]
    if first is None:
        raise UserError("--compare base means the base below an adapter; pass another file of samples")
    return [first, first.without_adapter()]


def _is_samples_file(name: str) -> bool:
    path = Path(name).expanduser()
    return path.is_file() or path.name.endswith((".jsonl", ".jsonl.gz"))


def _choose_ks(options: EvaluateOptions, sides: list[_FileSide | _ModelSide], plan: Plan | None) -> tuple[int, ...]:
    """Return the values of k for pass@k: the requested ones, or the default ones that have enough samples."""
    fewest = min((side.file.fewest for side in sides if isinstance(side, _FileSide)), default=None)
    if fewest is None:
        return plan.ks if plan else ()
    usual = plan.ks if plan else tuple(k for k in (1, 10, 100) if k <= fewest)
    ks = tuple(sorted(set(options.k))) if options.k else usual
    if max(ks) > fewest:
        raise UserError(f"--k {max(ks)} exceeds {fewest}, the fewest samples of a task; pass --k {fewest} or less")
    return ks


def _default_folder(options: EvaluateOptions, side: _FileSide | _ModelSide) -> Path:
    name = options.target
    given = Path(name).expanduser()
    evaluation = f"{side.task}-{evaluation_folder.digest(side.request)}"
    if isinstance(side, _ModelSide) and run_of(given) == given:
        return given / "evaluation" / evaluation
    stem = json_files.stem(given) if isinstance(side, _FileSide) else name.strip("/.~").replace("/", "--")
    return Path("outputs") / "evaluation" / f"{stem}-{evaluation}"
