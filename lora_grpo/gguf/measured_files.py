"""GGUF files with their sizes, and what evaluation and export measured on these files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from lora_grpo.evaluation import Report, percent
from lora_grpo.files import atomic, disk
from lora_grpo.gguf.cost import ExportedFile, exported_files
from lora_grpo.models import adapter_sha256, source_adapter

Table = tuple[list[str], list[tuple[str, ...]]]
"""Headings and rows."""


@dataclass(frozen=True)
class MeasuredFile:
    """A GGUF file."""

    name: str
    size: int
    """In bytes."""
    report: Report | None
    """The evaluation of this file; None if it was not measured like the others."""
    exported: ExportedFile | None = None
    """What the export measured, if that is known."""

    @property
    def kl(self) -> float | None:
        """Divergence from the model that the file was made from, in nats per token, if the export measured it."""
        return self.exported.kl if self.exported else None


def current_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder of a run that were made from the adapter that the run has now."""
    exported = exported_files(folder)
    adapter = adapter_sha256(source_adapter(folder)) if exported else ""
    return [folder / name for name, file in exported.items() if file.adapter_sha256 == adapter]


def measured_files(paths: Sequence[Path], reports: Mapping[Path, Report]) -> tuple[MeasuredFile, ...]:
    """Return GGUF files, the largest first, with what was measured of them. Empty if nothing was.

    Of the evaluations of a run by their folders, only those with one protocol and one baseline are used, so that the
    scores of the files are comparable: those of the protocol with a baseline that measured most files, with most
    samples.
    """
    measured = {path: report for path, report in reports.items() if report.evaluated.source.get("gguf_sha256")}
    paths = sorted(paths, key=lambda path: (-path.stat().st_size, path.name))
    exported = {
        folder / name: file
        for folder in {path.parent for path in paths}
        for name, file in exported_files(folder).items()
    }
    digests = {path: atomic.sha256(path) for path in paths} if measured else {}
    alike: dict[str, dict[str, Report]] = {}
    for report in measured.values():
        if (digest := report.evaluated.source["gguf_sha256"]) in digests.values():
            baseline = report.baseline and (report.baseline.label, report.baseline.source)
            alike.setdefault(f"{report.protocol.model_dump_json()} {baseline}", {}).setdefault(digest, report)

    def weight(group: Mapping[str, Report]) -> tuple[bool, int, int]:
        return any(report.table for report in group.values()), len(group), _samples(group)

    chosen = max(alike.values(), key=weight) if alike else {}
    for path, report in measured.items():
        if report.evaluated.source["gguf_sha256"] in digests.values() and report not in chosen.values():
            print(f"{path}/report.json has other settings than other GGUF files; it is left out", file=sys.stderr)
    files = [
        MeasuredFile(path.name, path.stat().st_size, chosen.get(digests.get(path, "")), exported.get(path))
        for path in paths
    ]
    return tuple(files) if any(file.report or file.kl is not None for file in files) else ()


def files_table(files: Sequence[MeasuredFile]) -> Table:
    """Return a row for each file with what was measured of it, below that of the 16-bit model if there is one."""
    first = next((file.report for file in files if file.report), None)
    baseline = first.baseline if first else None
    metric = next(iter(first.evaluated.scores)) if first else ""
    headings = ["file", "size"]
    headings += [_metric(first)] if first else []
    headings += ["difference"] if baseline else []
    headings += ["KL"] if any(file.kl is not None for file in files) else []
    rows: list[tuple[str, ...]] = []
    if first and baseline:
        row = [_named(first), "", _score(baseline.scores, baseline.intervals, metric)]
        rows.append((*row, *[""] * (len(headings) - len(row))))
    for file in files:
        row = [file.name, disk.size(file.size)]
        if first:
            measured = file.report.evaluated if file.report else None
            row.append(_score(measured.scores, measured.intervals, metric) if measured else "–")
        if baseline:
            compared = [each for each in file.report.table if each.metric == metric] if file.report else []
            row += [percent(each.difference, each.difference_interval, "+") for each in compared] or ["–"]
        if "KL" in headings:
            row.append("–" if file.kl is None else nats(file.kl))
        rows.append(tuple(row))
    return headings, rows


def files_legend(files: Sequence[MeasuredFile], shown: Report | None = None) -> str:
    """Return what the columns of the table are, in one line. `shown` is the evaluation that the page explains above."""
    parts = []
    if first := next((file.report for file in files if file.report), None):
        protocol, sampling = first.protocol, first.protocol.sampling
        is_same = shown is not None and (shown.protocol.data_sha256, shown.protocol.rows) == (
            protocol.data_sha256,
            protocol.rows,
        )
        drawn = ""
        if sampling and sampling.temperature:
            drawn = f", mean of {sampling.num_samples} samples at temperature {sampling.temperature:g}"
        problems = f"{'the same ' if is_same else ''}{protocol.rows} problems"
        intervals = "" if shown else ", with 95% intervals"
        parts.append(f"{_metric(first)}: percent of {problems} solved{drawn}{intervals}")
        if first.baseline:
            parts.append(f"difference: from the {first.baseline.label} model")
    if any(file.kl is not None for file in files):
        parts.append("KL: how far the export moved the next-token probabilities, in nats per token")
    if any("–" in row for row in files_table(files)[1]):
        parts.append("–: not measured")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def files_notes(files: Sequence[MeasuredFile]) -> list[str]:
    """Return a sentence on what the type of each evaluated file costs, and one on the texts of the KL divergence."""
    notes = [file.report.cost for file in files if file.report and file.report.cost]
    for exported in [file.exported for file in files if file.exported and file.kl is not None][:1]:
        texts = "completions of the run" if exported.of_run else "plain text"
        notes.append(f"KL divergence: on {exported.tokens} tokens of {texts}")
    return notes


def nats(value: float) -> str:
    """Return a divergence with two significant digits and without an exponent."""
    return f"{Decimal(f'{value:.2g}'):f}"


def _samples(group: Mapping[str, Report]) -> int:
    return sum(report.evaluated.samples for report in group.values())


def _metric(report: Report) -> str:
    """Return the first score of a report, as the heading of a column."""
    metric, sampling = next(iter(report.evaluated.scores)), report.protocol.sampling
    return f"greedy {metric}" if sampling and not sampling.temperature else metric


def _named(report: Report) -> str:
    assert report.baseline
    source = report.baseline.source
    return f"{report.baseline.label}, {'16' if source.get('quantization') == 'none' else source.get('bits')} bits"


def _score(scores: Mapping[str, float], intervals: Mapping[str, Sequence[float]], metric: str) -> str:
    return percent(scores[metric], intervals[metric]) if metric in scores else "–"
