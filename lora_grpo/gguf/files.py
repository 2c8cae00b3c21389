"""The GGUF files of a folder: gguf_report.json, the model that each was made from, and one table of what they cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, percent, read_reports
from lora_grpo.files import atomic, disk
from lora_grpo.merging import read_report
from lora_grpo.models import adapter_sha256, source_adapter

REPORT = "gguf_report.json"
Table = tuple[list[str], list[tuple[str, ...]]]
"""Headings and rows."""
_FOLDERS = {"gguf": "GGUF files", "best-gguf": "GGUF files of the best adapter"}


class ExportedFile(BaseModel):
    """One file of an export."""

    model_config = ConfigDict(frozen=True)

    type: str
    bytes: int
    kl: float | None = None
    """KL(model || file) in nats per token; None if it was not measured, or not yet when the export was killed."""
    tokens: int = 0
    of_run: bool = False
    """Whether the texts are completions of the run, or plain text."""
    not_measured: str | None = None
    """The reason, if the divergence was not measured."""
    adapter_sha256: str | None = None
    """The adapter that was merged into the model, if that is known."""
    onto: str | None = None
    """The base of that merge: `full` or `dequantized`."""
    dtype: str | None = None
    """The dtype of the merged model."""


class _Report(BaseModel):
    """The contents of gguf_report.json."""

    files: dict[str, ExportedFile]
    """By name."""


@dataclass(frozen=True)
class MeasuredFile:
    """A GGUF file, with what the export and an evaluation measured of it."""

    name: str
    size: int
    """In bytes."""
    report: Report | None
    """The evaluation of this file; None if it was not evaluated like the others."""
    exported: ExportedFile | None = None
    """What the export measured, if that is known."""

    @property
    def kl(self) -> float | None:
        """Divergence from the model that the file was made from, in nats per token, if the export measured it."""
        return self.exported.kl if self.exported else None


@dataclass(frozen=True)
class GgufSection:
    """A table of the GGUF files that were made from one adapter of a run."""

    heading: str
    title: str | None
    """Task, number of samples and sampling settings; None if no file was evaluated."""
    table: Table
    notes: list[str]


def write_files(folder: Path, files: Mapping[str, ExportedFile]) -> None:
    """Write gguf_report.json. `files` has the files of a folder by their names."""
    atomic.write_json(folder / REPORT, _Report(files=dict(files)).model_dump())


def exported_files(folder: Path) -> dict[str, ExportedFile]:
    """Return the files that gguf_report.json describes and that still exist in the folder, by name.

    Files that were replaced by others are left out. Empty if there is no readable report.
    """
    try:
        report = _Report.model_validate_json((folder / REPORT).read_bytes())
    except (OSError, ValidationError):
        return {}
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.gguf")}
    return {name: file for name, file in report.files.items() if sizes.get(name) == file.bytes}


def check_exported(folder: Path) -> None:
    """Raise a UserError if a file of a folder was made from another adapter or merge than its card describes.

    A folder without gguf_report.json is accepted as it is.
    """
    folder = folder.resolve()
    if not (folder / REPORT).is_file():
        return
    files, merge, adapter = exported_files(folder), read_report(folder), source_adapter(folder)
    made_from, expected = "the last export", merge.identity.get("adapter_sha256") if merge else None
    if (folder.parent / "run.json").is_file() and adapter.is_dir():
        made_from, expected = str(adapter), adapter_sha256(adapter)
    unknown, other_adapter, other_merge = [], [], []
    for name in sorted(path.name for path in folder.glob("*.gguf")):
        file = files.get(name)
        if file is None or (expected and not file.adapter_sha256):
            unknown.append(name)
        elif file.adapter_sha256 != expected:
            other_adapter.append(name)
        elif merge and (file.onto, file.dtype) != (merge.onto, merge.dtype):
            other_merge.append(name)
        elif file.kl is None and file.not_measured is None:
            print(f"note: the export of {name} was interrupted; export it again for its KL divergence", file=sys.stderr)
    problems = {
        f"not in {REPORT} with this size and an adapter, so of unknown source": unknown,
        f"made from another adapter than {made_from}": other_adapter,
        f"made from another merge than the last export ({merge and merge.onto}, {merge and merge.dtype})": other_merge,
    }
    for problem, names in problems.items():
        if names:
            raise UserError(
                f"{folder}: {', '.join(names)}: {problem}; run {command('export-gguf')} again, and move or delete what "
                "it does not replace"
            )


def measured_files(paths: Sequence[Path], reports: Mapping[Path, Report]) -> tuple[MeasuredFile, ...]:
    """Return the GGUF files of a folder, the largest first, with what was measured of them. Empty if nothing was.

    Scores are comparable only within one protocol: that of the first file with an evaluation in `reports`, which has
    the evaluations of a run by their folders.
    """
    exported = exported_files(paths[0].parent) if paths else {}
    evaluations = {report.evaluated.source.get("gguf_sha256"): report for report in reports.values()}
    evaluations.pop(None, None)
    files: list[MeasuredFile] = []
    protocol = None
    for path in sorted(paths, key=lambda path: (-path.stat().st_size, path.name)):
        report = evaluations.get(atomic.sha256(path)) if evaluations else None
        if report and protocol and report.protocol != protocol:
            print(f"the evaluation of {path} has other settings than others; it is left out", file=sys.stderr)
            report = None
        elif report:
            protocol = report.protocol
        files.append(MeasuredFile(path.name, path.stat().st_size, report, exported.get(path.name)))
    return tuple(files) if any(file.report or file.kl is not None for file in files) else ()


def files_table(files: Sequence[MeasuredFile]) -> Table:
    """Return a row for each file: size, first score and divergence. Columns without any value are omitted."""
    evaluated = next((file.report for file in files if file.report), None)
    has_kl = any(file.kl is not None for file in files)
    headings = ["file", "size", *([_metric(evaluated)] if evaluated else []), *(["KL"] if has_kl else [])]
    rows = []
    for file in files:
        row = [file.name, disk.size(file.size)]
        if evaluated:
            row.append(_first_score(file.report) if file.report else "–")
        if has_kl:
            row.append("–" if file.kl is None else nats(file.kl))
        rows.append(tuple(row))
    return headings, rows


def files_notes(files: Sequence[MeasuredFile]) -> list[str]:
    """Return what the columns of the table are, in one line, and what the type of each evaluated file costs."""
    columns = []
    if first := next((file.report for file in files if file.report), None):
        sampling = first.protocol.sampling
        samples = ""
        if sampling and sampling.temperature:
            samples = f", mean of {sampling.num_samples} samples at temperature {sampling.temperature:g}"
        solved = f"percent of {first.protocol.rows} problems solved{samples}, with 95% intervals"
        columns.append(f"{_metric(first)}: {solved}")
    for exported in [file.exported for file in files if file.exported and file.kl is not None][:1]:
        texts = "completions of the run" if exported.of_run else "plain text"
        moved = "how far the export moved the next-token probabilities, in nats per token"
        columns.append(f"KL: {moved}, on {exported.tokens} tokens of {texts}")
    if any("–" in row for row in files_table(files)[1]):
        columns.append("–: not measured")
    text = "; ".join(columns)
    return [f"{text[:1].upper()}{text[1:]}.", *(file.report.cost for file in files if file.report and file.report.cost)]


def gguf_sections(run: Path) -> list[GgufSection]:
    """Return a section for each folder of a run with measured GGUF files of the adapter that is in the run now."""
    sections = []
    for name, heading in _FOLDERS.items():
        folder = run / name
        exported = exported_files(folder)
        adapter = adapter_sha256(source_adapter(folder)) if exported else ""
        paths = [folder / name for name, file in exported.items() if file.adapter_sha256 == adapter]
        if files := measured_files(paths, read_reports(run) if paths else {}):
            title = next((file.report.title for file in files if file.report), None)
            sections.append(GgufSection(heading, title, files_table(files), files_notes(files)))
    return sections


def nats(value: float) -> str:
    """Return a divergence with two significant digits and without an exponent."""
    return f"{Decimal(f'{value:.2g}'):f}"


def _metric(report: Report) -> str:
    """Return the first score of a report, as the heading of a column."""
    metric, sampling = next(iter(report.evaluated.scores)), report.protocol.sampling
    return f"greedy {metric}" if sampling and not sampling.temperature else metric


def _first_score(report: Report) -> str:
    metric, score = next(iter(report.evaluated.scores.items()))
    return percent(score, report.evaluated.intervals[metric])
