"""The GGUF files of a push with their sizes, and what `scripts/evaluate.py` measured on these files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.evaluation import Report, percent
from lora_grpo.files import atomic

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


def measured_files(folder: Path, reports: Mapping[Path, Report]) -> tuple[MeasuredFile, ...]:
    """Return the GGUF files of a folder, with those of the reports that measured them. Empty if none was measured.

    The reports share one protocol and one baseline, so that the figures of the files are comparable: those of the
    protocol with a baseline that measured most files, with most samples.
    """
    measured = {path: report for path, report in reports.items() if report.evaluated.source.get("gguf_sha256")}
    if not measured:
        return ()
    paths = sorted(folder.glob("*.gguf"), key=lambda path: (-path.stat().st_size, path.name))
    digests = {path: atomic.sha256(path) for path in paths}
    alike: dict[str, dict[str, Report]] = {}
    for report in measured.values():
        if (digest := report.evaluated.source["gguf_sha256"]) in digests.values():
            baseline = report.baseline and report.baseline.label
            alike.setdefault(f"{report.protocol.model_dump_json()} {baseline}", {}).setdefault(digest, report)
    if not alike:
        return ()

    def weight(group: Mapping[str, Report]) -> tuple[bool, int, int]:
        return any(report.table for report in group.values()), len(group), _samples(group)

    chosen = max(alike.values(), key=weight)
    for path, report in measured.items():
        if report.evaluated.source["gguf_sha256"] in digests.values() and report not in chosen.values():
            print(
                f"{path}/report.json has other settings than other GGUF files; the card leaves it out", file=sys.stderr
            )
    return tuple(MeasuredFile(path.name, path.stat().st_size, chosen.get(digests[path])) for path in paths)


def files_table(files: Sequence[MeasuredFile]) -> Table:
    """Return a row for each file, with its size and its score, below that of the 16-bit model."""
    first = next(file.report for file in files if file.report)
    metric = next(iter(first.evaluated.scores))
    headings = ["file", "size", metric]
    rows: list[tuple[str, ...]] = []
    if first.baseline:
        headings.append("difference")
        rows.append((_named(first), "", _score(first.baseline.scores, first.baseline.intervals, metric), ""))
    for file in files:
        measured = file.report.evaluated if file.report else None
        row = [file.name, _size(file.size), _score(measured.scores, measured.intervals, metric) if measured else "–"]
        if first.baseline:
            compared = [each for each in file.report.table if each.metric == metric] if file.report else []
            row += [percent(each.difference, each.difference_interval, "+") for each in compared] or ["–"]
        rows.append(tuple(row))
    return headings, rows


def _samples(group: Mapping[str, Report]) -> int:
    return sum(report.evaluated.samples for report in group.values())


def _named(report: Report) -> str:
    assert report.baseline
    source = report.baseline.source
    return f"{report.baseline.label}, {'16' if source.get('quantization') == 'none' else source.get('bits')} bits"


def _score(scores: Mapping[str, float], intervals: Mapping[str, Sequence[float]], metric: str) -> str:
    return percent(scores[metric], intervals[metric]) if metric in scores else "–"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
