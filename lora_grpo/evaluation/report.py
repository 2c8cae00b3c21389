"""The report of an evaluation: the schema of report.json, its tables and sentences; makes, reads and writes reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from lora_grpo import console
from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation.comparison import Comparison, ProblemChange, compare, problem_changes
from lora_grpo.evaluation.gain import FORMAT_NOTE, Part, split_gain
from lora_grpo.evaluation.measurement import Measurement, measure, without_failed
from lora_grpo.evaluation.protocol import Protocol
from lora_grpo.evaluation.results import GREEDY, Result, has_failed
from lora_grpo.evaluation.schema import Schema, percent
from lora_grpo.evaluation.tables import Table, comparison_cells, count_cell
from lora_grpo.files import atomic, json_files, markdown, markdown_table, printable, text_table

REPORT = "report.json"
_SHOWN_COUNTS = ("unparsed", "truncated", "mean tokens", "mean turns")
"""Statistics of one model's samples that the terminal shows. The files have all."""
_AnyReport = TypeVar("_AnyReport", bound=Schema)


class Report(Schema):
    """One evaluated model, or two compared on the same problems."""

    protocol: Protocol
    evaluated: Measurement
    baseline: Measurement | None
    table: list[Comparison]
    """Comparison of the baseline with the evaluated model, one row per score."""
    fixed: list[ProblemChange]
    regressed: list[ProblemChange]
    gain: list[Part] = Field(default_factory=list)
    """The gain in pass@1, its part from the answer format, and its other part; empty if they cannot be separated."""

    @property
    def models(self) -> list[Measurement]:
        """The baseline, if any, and the evaluated model."""
        return [self.baseline, self.evaluated] if self.baseline else [self.evaluated]

    # Tables

    def scores_table(self) -> Table:
        """Return the scores with their intervals, and the comparison if there is a baseline."""
        model = self.evaluated
        if not self.baseline:
            scores = [(name, percent(score, model.intervals[name])) for name, score in model.scores.items()]
            return Table(["", "% [95% interval]"], [*scores])
        comparisons = [(row.metric, *comparison_cells(row), row.p_text) for row in self.table]
        return Table(["", self.baseline.label, model.label, "difference", "p"], [*comparisons])

    def details_table(self) -> Table:
        """Return rules, statuses and lengths of greedy and other samples, with one column per model."""
        rows: list[tuple[str, ...]] = []
        kinds: dict[str, None] = {}  # an ordered set, as `names` is
        for model in self.models:
            kinds |= dict.fromkeys(model.sample_stats)
        for kind in kinds:
            counts_by_model = [model.sample_stats.get(kind, {}) for model in self.models]
            names: dict[str, None] = {}
            for counts in counts_by_model:
                names |= dict.fromkeys(counts)
            names.pop("samples", None)
            for name in names:
                title = f"{name}, {kind}" if len(kinds) > 1 else name
                rows.append((title, *(count_cell(name, counts) for counts in counts_by_model)))
        columns = [model.label for model in self.models] if self.baseline else ["% of samples"]
        return Table(["", *columns], rows)

    def gain_table(self) -> Table:
        """Return the parts of the gain in percentage points."""
        parts = [(part.name, percent(part.value, part.interval, "+")) for part in self.gain]
        return Table(["", "points [95% interval]"], [*parts])

    # Sentences

    @property
    def title(self) -> str:
        """Task, numbers of samples and sampling settings in one line."""
        model = self.evaluated
        sampling = self.protocol.sampling
        if not sampling:
            return f"{self.protocol.task}: {model.samples} samples of {model.tasks} tasks"

        num_greedy = int(model.sample_stats.get(GREEDY, {}).get("samples", 0))
        num_others = model.samples - num_greedy
        decoding = "greedy"
        if num_others and sampling.temperature:
            decoding = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
        parts = [f"{self.protocol.task}: {num_others or num_greedy} samples of {model.tasks} tasks", decoding]
        if num_others and num_greedy:
            parts.append(f"and {num_greedy} greedy ones")
        if sampling.prompt_style:
            parts.append(f"{sampling.prompt_style} style")
        parts.append(f"{sampling.few_shot}-shot")
        return ", ".join(parts)

    @property
    def changed(self) -> str:
        """The numbers of fixed and regressed problems, what a solved problem is, and the `guessing_warning`."""
        answers = "sampled" if "sampled" in self.models[0].sample_stats else "greedy"
        counts = f"{len(self.fixed)} problems fixed, {len(self.regressed)} regressed"
        text = f"{counts} (solved: at least half of the {answers} answers pass)"
        return f"{text}; {self.guessing_warning}" if self.guessing_warning else text

    @property
    def guessing_warning(self) -> str | None:
        """A warning if the evaluated model gives one answer to nearly all problems; None otherwise."""
        answer = self.evaluated.usual_answer
        if not answer:
            return None
        return f"{self.evaluated.label} answers {answer!r:.40} in at least 90% of the samples, whatever is asked"

    @property
    def left_out(self) -> str | None:
        """How many samples are left out because their agent failed; None if there are none."""
        counts = [f"{model.failed} of {model.label}" for model in self.models if model.failed]
        return f"left out, because the agent failed: samples {' and '.join(counts)}" if counts else None

    @property
    def cost(self) -> str | None:
        """The quality loss of a GGUF file compared with the baseline, in one line; None for other models."""
        if not self.table or not self.baseline or "gguf_sha256" not in self.evaluated.source:
            return None
        comparison = self.table[0]
        # A cost is a difference with the opposite sign, so its interval is reversed.
        low_difference, high_difference = comparison.difference_interval
        low = -100 * high_difference
        high = -100 * low_difference
        points = f"{-100 * comparison.difference:z.1f} points of {comparison.metric} [{low:z.1f}, {high:z.1f}]"
        note = "" if comparison.is_significant else ", no significant difference"
        return f"{self.evaluated.label} costs {points} against {self.baseline.label}{note}"

    # Output

    def markdown(self) -> str:
        """Return the report as Markdown: tables, verdicts, and the changed problems."""
        lines = [markdown(self.title), ""]
        lines += markdown_table(*self.scores_table())
        lines += markdown_table(*self.details_table())
        if self.gain:
            lines += markdown_table(*self.gain_table())

        sentences = []
        if self.cost:
            sentences.append(self.cost)
        sentences += [comparison.verdict for comparison in self.table]
        if self.gain:
            sentences.append(FORMAT_NOTE)
        if self.guessing_warning:
            sentences.append(self.guessing_warning)
        if self.left_out:
            sentences.append(self.left_out)
        for word, changes in (("fixed", self.fixed), ("regressed", self.regressed)):
            if changes:
                problems = ", ".join(change.problem_id for change in changes)
                sentences.append(f"{len(changes)} {word}: {problems}")
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
                shown = [name for name in _SHOWN_COUNTS if name in counts]
                if "unparsed" in shown and not counts["unparsed"]:  # a task may not parse answers at all
                    shown.remove("unparsed")
                if shown:
                    cells = ", ".join(f"{name} {count_cell(name, counts)}" for name in shown)
                    lines.append(f"% of {kind} samples: {cells}")
            if self.guessing_warning:
                lines.append(self.guessing_warning)
        if self.cost:
            lines.append(self.cost)
        if self.left_out:
            lines.append(self.left_out)
        console.result("\n".join(printable(line) for line in lines))


@dataclass(frozen=True)
class Graded:
    """One model's graded samples. For `label` and `source`, see `Measurement`."""

    label: str
    results: Sequence[Result]
    source: Mapping[str, Any]
    protocol: Protocol


def make_report(ks: Sequence[int], evaluated: Graded, baseline: Graded | None = None) -> Report:
    """Measure one model, or compare two models on the same problems.

    Args:
        ks: the k of pass@k.
        baseline: the model that the differences are against.

    Raises:
        RunError: no samples are left, because agents failed.
    """
    seed = evaluated.protocol.seed
    models = [evaluated] if baseline is None else [baseline, evaluated]
    results_of_models = without_failed([model.results for model in models], ks)
    measured = []
    for model, results in zip(models, results_of_models, strict=True):
        num_failed = sum(map(has_failed, model.results))
        if not results:
            raise RunError(
                f"{model.protocol.task}: nothing is left to compare, because the agent failed in {num_failed} of "
                f"{len(model.results)} episodes of {model.label}; mend it, and run the command again"
            )
        measured.append(measure(model.label, results, model.source, ks, seed, num_failed))
    if baseline is None:
        return Report(
            protocol=evaluated.protocol, evaluated=measured[0], baseline=None, table=[], fixed=[], regressed=[], gain=[]
        )
    before, after = results_of_models
    changes = problem_changes(before, after)
    return Report(
        protocol=evaluated.protocol,
        evaluated=measured[1],
        baseline=measured[0],
        table=compare(before, after, ks, seed),
        fixed=changes.fixed,
        regressed=changes.regressed,
        gain=split_gain(before, after, seed),
    )


def write_report(folder: Path, report: Report) -> None:
    """Write report.json, with the scores of the evaluated model at the top level, and report.md."""
    atomic.write_json(folder / REPORT, {**report.evaluated.scores, **report.model_dump(by_alias=True)})
    atomic.write_text(folder / "report.md", report.markdown())


def read_report(folder: Path) -> Report | None:
    """Return the report in a folder, or None if there is none."""
    return read_as(Report, folder)


def read_as(kind: type[_AnyReport], folder: Path) -> _AnyReport | None:
    """Return the report of a kind in a folder, or None if there is none."""
    path = folder / REPORT
    if not path.is_file():
        return None
    problem = f"{path} is not an evaluation report"
    return json_files.validated(json_files.read_object(path), kind, problem, "evaluate again")


def read_reports(run: Path) -> dict[Path, Report]:
    """Return the reports of a run's evaluations by their folders, beginning with the evaluation that the run made.

    Reports of sample files are left out. So are, with a message, damaged reports and those on fewer rows (`--limit`).
    """
    reports = {}
    for folder in (run / "evaluation", *sorted((run / "evaluation").glob("*/"))):
        try:
            report = read_report(folder)
        except UserError as error:
            console.note(f"{error}; it is left out")
            continue
        if report and report.protocol.limit:
            console.note(f"{folder} has a report of {report.protocol.limit} rows (--limit); it is left out")
        elif report and report.protocol.sampling:
            reports[folder] = report
    return reports
