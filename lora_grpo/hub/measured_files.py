"""The GGUF files of a push with their sizes, and what `evaluate.py` and `export_gguf.py` measured on these files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.evaluation import Report, percent
from lora_grpo.files import atomic
from lora_grpo.gguf_export import GgufFile, read_gguf_report

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
    exported: GgufFile | None = None
    """What the export measured: the KL divergence from the model that the file was made from."""


def measured_files(folder: Path, reports: Mapping[Path, Report]) -> tuple[MeasuredFile, ...]:
    """Return the GGUF files of a folder with what was measured of them. Empty if nothing was.

    The reports share one protocol and one baseline, so that the figures of the files are comparable: those of the
    protocol with a baseline that measured most files, with most samples.
    """
    measured = {path: report for path, report in reports.items() if report.evaluated.source.get("gguf_sha256")}
    paths = sorted(folder.glob("*.gguf"), key=lambda path: (-path.stat().st_size, path.name))
    export = read_gguf_report(folder)
    exported = {
        path: file
        for path in paths
        if (file := export and export.files.get(path.name))
        and file.kl is not None
        and file.bytes == path.stat().st_size
    }
    digests = {path: atomic.sha256(path) for path in paths} if measured else {}
    alike: dict[str, dict[str, Report]] = {}
    for report in measured.values():
        if (digest := report.evaluated.source["gguf_sha256"]) in digests.values():
            baseline = report.baseline and report.baseline.label
            alike.setdefault(f"{report.protocol.model_dump_json()} {baseline}", {}).setdefault(digest, report)
    if not alike and not exported:
        return ()

    def weight(group: Mapping[str, Report]) -> tuple[bool, int, int]:
        return any(report.table for report in group.values()), len(group), _samples(group)

    chosen = max(alike.values(), key=weight) if alike else {}
    for path, report in measured.items():
        if report.evaluated.source["gguf_sha256"] in digests.values() and report not in chosen.values():
            print(
                f"{path}/report.json has other settings than other GGUF files; the card leaves it out", file=sys.stderr
            )
    return tuple(
        MeasuredFile(path.name, path.stat().st_size, chosen.get(digests.get(path, "")), exported.get(path))
        for path in paths
    )


def files_table(files: Sequence[MeasuredFile]) -> Table:
    """Return a row for each file with what was measured of it, below that of the 16-bit model if there is one."""
    first = next((file.report for file in files if file.report), None)
    baseline = first.baseline if first else None
    metric = next(iter(first.evaluated.scores)) if first else ""
    headings = ["file", "size"]
    headings += [metric] if first else []
    headings += ["difference"] if baseline else []
    headings += ["KL"] if any(file.exported for file in files) else []
    rows: list[tuple[str, ...]] = []
    if first and baseline:
        row = [_named(first), "", _score(baseline.scores, baseline.intervals, metric)]
        rows.append((*row, *[""] * (len(headings) - len(row))))
    for file in files:
        row = [file.name, _size(file.size)]
        if first:
            measured = file.report.evaluated if file.report else None
            row.append(_score(measured.scores, measured.intervals, metric) if measured else "–")
        if baseline:
            compared = [each for each in file.report.table if each.metric == metric] if file.report else []
            row += [percent(each.difference, each.difference_interval, "+") for each in compared] or ["–"]
        if "KL" in headings:
            row.append(f"{file.exported.kl:.2g}" if file.exported else "–")
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
