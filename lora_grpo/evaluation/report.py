"""The report of an evaluation: the schema of report.json, and tables for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from lora_grpo import __version__, console
from lora_grpo.config import DataConfig
from lora_grpo.errors import UserError
from lora_grpo.evaluation.measurement import (
    FORMAT_NOTE,
    Comparison,
    Measurement,
    Part,
    Schema,
    TaskChange,
    compare,
    measure,
    percent,
    split_gain,
    task_changes,
)
from lora_grpo.evaluation.results import Result
from lora_grpo.files import atomic, json_files, markdown, markdown_table, printable
from lora_grpo.sampling import SamplingParams
from lora_grpo.tasks import CODE_TASKS, TaskFile, get_task, task_sha256, task_title

REPORT = "report.json"
_Read = TypeVar("_Read", bound=Schema)
Table = tuple[list[str], list[tuple[str, ...]]]
"""Headings and rows."""


class Sampling(Schema):
    """How completions were sampled."""

    prompt_style: str | None
    """None for a task file, which writes its own prompts."""
    few_shot: int
    num_samples: int
    temperature: float
    top_p: float
    max_completion_tokens: int
    max_turn_tokens: int | None = None


class Protocol(Schema):
    """The settings that two evaluations must share for their scores to be comparable."""

    task: str
    task_sha256: str | None = None
    """SHA-256 of the task file; None for built-in tasks."""
    rows: int
    data_sha256: str
    data_source: str | None = None
    """File or Hub dataset of the rows; None for the task's own dataset."""
    sampling: Sampling | None = None
    """None for files of samples."""
    grading: str
    sandbox: str | None = None
    """How programs were isolated; None if no programs were run."""
    seed: int
    """Seed of the rows, the samples and the intervals."""
    limit: int | None = None
    """The `--limit`, if it excluded rows. Such a report is not published."""
    version: str = __version__


class Report(Schema):
    """One evaluated model, or two compared on the same tasks."""

    protocol: Protocol
    evaluated: Measurement
    baseline: Measurement | None
    table: list[Comparison]
    """Comparison of the baseline with the evaluated model, one row per score."""
    fixed: list[TaskChange]
    regressed: list[TaskChange]
    gain: list[Part] = Field(default_factory=list)
    """The difference in pass@1, the part from the answer format and the other; empty if they cannot be separated."""

    @property
    def models(self) -> list[Measurement]:
        """The baseline, if any, and the evaluated model."""
        return [model for model in (self.baseline, self.evaluated) if model]

    @property
    def title(self) -> str:
        """Task, number of samples and sampling settings in one line."""
        protocol, sampling = self.protocol, self.protocol.sampling
        title = f"{protocol.task}: {self.evaluated.samples} samples of {self.evaluated.tasks} tasks"
        if sampling:
            sampled = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
            how = sampled if sampling.temperature else "greedy"
            style = f"{sampling.prompt_style} style, " if sampling.prompt_style else ""
            title += f", {how}, {style}{sampling.few_shot}-shot"
        return title

    def scores_table(self) -> Table:
        """Return the scores with their intervals, and the comparison if there is a baseline."""
        model = self.evaluated
        if not self.baseline:
            return ["", "% [95% interval]"], [
                (name, percent(score, model.intervals[name])) for name, score in model.scores.items()
            ]
        return ["", self.baseline.label, model.label, "difference", "p"], [
            (
                row.metric,
                percent(row.before, row.before_interval),
                percent(row.after, row.after_interval),
                percent(row.difference, row.difference_interval, "+"),
                row.p_text,
            )
            for row in self.table
        ]

    def details_table(self) -> Table:
        """Return rules, statuses and lengths of greedy and other samples, with one column per model."""
        rows: list[tuple[str, ...]] = []
        kinds = dict.fromkeys(kind for model in self.models for kind in model.sample_stats)
        for kind in kinds:
            counts = [model.sample_stats.get(kind, {}) for model in self.models]
            for name in dict.fromkeys(name for each in counts for name in each if name != "samples"):
                row = f"{name}, {kind}" if len(kinds) > 1 else name
                rows.append((row, *(_cell(name, each) for each in counts)))
        return ["", *([model.label for model in self.models] if self.baseline else ["% of samples"])], rows

    def gain_table(self) -> Table:
        """Return the parts of the gain in percentage points."""
        rows: list[tuple[str, ...]] = [(part.name, percent(part.value, part.interval, "+")) for part in self.gain]
        return ["", "points [95% interval]"], rows

    @property
    def changed(self) -> str:
        """The numbers of fixed and regressed problems, the definition of a solved problem, and `guess`."""
        answers = "sampled" if "sampled" in self.models[0].sample_stats else "greedy"
        counts = f"{len(self.fixed)} problems fixed, {len(self.regressed)} regressed"
        return "; ".join([f"{counts} (solved: at least half of the {answers} answers pass)", *self.guess])

    @property
    def guess(self) -> list[str]:
        """A sentence if the evaluated model gives one answer to nearly all tasks: training can teach to guess."""
        label, answer = self.evaluated.label, self.evaluated.usual_answer
        return [f"{label} answers {answer!r:.40} in at least 90% of the samples, whatever is asked"] if answer else []

    @property
    def cost(self) -> str | None:
        """The quality loss of a GGUF file compared with the baseline, in one line; None for other models."""
        if not self.table or not self.baseline or "gguf_sha256" not in self.evaluated.source:
            return None
        row = self.table[0]
        high, low = (-100 * bound for bound in row.difference_interval)
        points = f"{-100 * row.difference:z.1f} points of {row.metric} [{low:z.1f}, {high:z.1f}]"
        note = "" if row.is_significant else ", no significant difference"
        return f"{self.evaluated.label} costs {points} against {self.baseline.label}{note}"

    def markdown(self) -> str:
        """Return the report as Markdown: tables, verdicts, and the changed tasks."""
        lines = [markdown(self.title), ""]
        for table in (self.scores_table(), self.details_table(), *([self.gain_table()] if self.gain else [])):
            lines += markdown_table(*table)
        sentences = [self.cost] if self.cost else []
        sentences += [*(row.verdict for row in self.table), *([FORMAT_NOTE] if self.gain else []), *self.guess]
        for word, changes in (("fixed", self.fixed), ("regressed", self.regressed)):
            names = ", ".join(change.task_id for change in changes)
            sentences += [f"{len(changes)} {word}: {names}"] if changes else []
        lines += [f"- {markdown(sentence)}" for sentence in sentences]
        lines += ["", f"Protocol: `{printable(self.protocol.model_dump_json())}`"]
        return "".join(f"{line}\n" for line in lines)

    def show(self) -> None:
        """Print the title, the scores and a one-line summary."""
        lines = [self.title, *text_table(*self.scores_table())]
        if self.table:
            lines.append(f"{self.table[0].verdict}; {self.changed}")
        else:
            for kind, counts in self.evaluated.sample_stats.items():
                names = [name for name in ("unparsed", "truncated", "mean tokens", "mean turns") if name in counts]
                lines.append(f"% of {kind} samples: " + ", ".join(f"{name} {_cell(name, counts)}" for name in names))
            lines += self.guess
        lines += [self.cost] if self.cost else []
        console.result("\n".join(map(printable, lines)))


@dataclass(frozen=True)
class Graded:
    """One model's graded samples. The label and the source are those of `Measurement`."""

    label: str
    results: Sequence[Result]
    source: Mapping[str, Any]
    protocol: Protocol


def make_protocol(
    data: DataConfig, record: Mapping[str, Any], params: SamplingParams | None, rows: int, seed: int
) -> Protocol:
    """Return the protocol of an evaluation on a number of rows.

    Args:
        record: the `data` entry of run.json.
        params: None for a file of samples.
    """
    task, sampling = data.evaluation_task, None
    if params:
        sampling = Sampling(
            prompt_style=None if isinstance(get_task(task), TaskFile) else data.prompt_style,
            few_shot=data.few_shot,
            num_samples=params.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            max_completion_tokens=params.max_tokens,
            max_turn_tokens=params.max_turn_tokens,
        )
    grading = "the number after the last ####, \\boxed{} or <answer>, or in a final statement, by value (`robust`)"
    found = get_task(task)
    if task in CODE_TASKS:
        grading = "the last code block, or a file's completion as it is, against the unit tests in the sandbox"
    elif isinstance(found, TaskFile):
        grading = f"`{'Environment' if found.environment else 'check'}` in {found.path.name}"
    return Protocol(
        task=task_title(task),
        task_sha256=task_sha256(task),
        rows=rows,
        data_sha256=record["eval"]["sha256"],
        data_source=data.eval,
        sampling=sampling,
        grading=grading,
        sandbox=record.get("sandbox"),
        seed=seed,
    )


def make_report(ks: Sequence[int], evaluated: Graded, baseline: Graded | None = None) -> Report:
    """Measure one model, or compare two models on the same tasks."""
    seed = evaluated.protocol.seed
    models = [model for model in (evaluated, baseline) if model]
    measured = [measure(model.label, model.results, model.source, ks, seed) for model in models]
    fixed, regressed = task_changes(baseline.results, evaluated.results) if baseline else ([], [])
    return Report(
        protocol=evaluated.protocol,
        evaluated=measured[0],
        baseline=measured[1] if baseline else None,
        table=compare(baseline.results, evaluated.results, ks, seed) if baseline else [],
        fixed=fixed,
        regressed=regressed,
        gain=split_gain(baseline.results, evaluated.results, seed) if baseline else [],
    )


def write_report(folder: Path, report: Report) -> None:
    """Write report.json, with the scores of the evaluated model at the top level, and report.md."""
    atomic.write_json(folder / REPORT, {**report.evaluated.scores, **report.model_dump()})
    atomic.write_text(folder / "report.md", report.markdown())


def read_report(folder: Path) -> Report | None:
    """Return the report in a folder, or None if there is none."""
    return read_as(Report, folder)


def read_as(kind: type[_Read], folder: Path) -> _Read | None:
    """Return the report of a kind in a folder, or None if there is none."""
    if not (path := folder / REPORT).is_file():
        return None
    problem = f"{path} is not an evaluation report"
    return json_files.validated(json_files.read_object(path), kind, problem, "evaluate again")


def read_reports(run: Path) -> dict[Path, Report]:
    """Return the reports of a run's evaluations by their folders. The run's own is first.

    Skip reports of sample files and, with a message, those of fewer rows by `--limit` and damaged ones.
    """
    reports = {}
    for path in (run / "evaluation", *sorted((run / "evaluation").glob("*/"))):
        try:
            report = read_report(path)
        except UserError as error:
            console.note(f"{error}; it is left out")
            continue
        if report and report.protocol.limit:
            console.note(f"{path} has a report of {report.protocol.limit} rows (--limit); it is left out")
        elif report and report.protocol.sampling:
            reports[path] = report
    return reports


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for the terminal."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return ["  ".join(map(str.rjust, cells, widths)) for cells in (headings, *rows)]


def _cell(name: str, counts: Mapping[str, float]) -> str:
    """Return a count as a percentage of the samples, followed by the number."""
    if not counts:
        return ""
    value = counts.get(name, 0)
    return f"{value:.1f}" if name.startswith("mean ") else f"{100 * value / counts['samples']:.1f} ({value:g})"
