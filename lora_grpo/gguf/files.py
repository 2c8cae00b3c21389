"""The GGUF files of a folder: gguf_report.json, the source model of each file, and a table of size and quality."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, percent, read_reports
from lora_grpo.files import atomic, disk
from lora_grpo.merging import read_report
from lora_grpo.models import adapter_sha256, source_adapter

REPORT = "gguf_report.json"
_FOLDERS = {"gguf": "GGUF files", "best-gguf": "GGUF files of the best adapter"}


class ExportedFile(BaseModel):
    """One file of an export."""

    model_config = ConfigDict(frozen=True)

    type: str
    bytes: int
    adapter_sha256: str | None = None
    """The adapter that was merged into the model; None if unknown."""


class _Report(BaseModel):
    """The contents of gguf_report.json."""

    files: dict[str, ExportedFile]
    """The files, by name."""


@dataclass(frozen=True)
class GgufSection:
    """A table of the GGUF files of a folder, with the measurements of evaluations."""

    heading: str
    title: str
    """Task, number of samples and sampling settings."""
    table: tuple[list[str], list[tuple[str, str, str]]]
    """Headings, and a row for each file: size and first score."""
    notes: list[str]
    """A description of the score, and the quality loss of each evaluated file."""
    evaluations: dict[str, Report]
    """Evaluations of the files, by name, the largest file first."""


def record_files(outputs: Mapping[str, Path], model: Path) -> None:
    """Add the files of an export, by type, to the gguf_report.json beside them. `model` is the exported folder."""
    folder, merge = next(iter(outputs.values())).parent, read_report(model)
    files, adapter = exported_files(folder), merge.identity.get("adapter_sha256") if merge else None
    for kind, path in outputs.items():
        files[path.name] = ExportedFile(type=kind, bytes=path.stat().st_size, adapter_sha256=adapter)
    atomic.write_json(folder / REPORT, _Report(files=files).model_dump())


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
    """Raise a UserError if a file of a folder was made from another adapter than its card describes.

    A folder without gguf_report.json is accepted as it is.
    """
    folder = folder.resolve()
    if not (folder / REPORT).is_file():
        return
    files, merge, adapter = exported_files(folder), read_report(folder), source_adapter(folder)
    expected = merge.identity.get("adapter_sha256") if merge else None
    if (folder.parent / "run.json").is_file() and adapter.is_dir():
        expected = adapter_sha256(adapter)
    for path in sorted(folder.glob("*.gguf")):
        file = files.get(path.name)
        if file is None or file.adapter_sha256 != expected:
            raise UserError(
                f"{path} was made from another adapter than {adapter} ({REPORT}); run {command('export-gguf')} again, "
                "or move or delete the file"
            )


def gguf_section(paths: Sequence[Path], reports: Mapping[Path, Report], heading: str = "") -> GgufSection | None:
    """Describe the GGUF files of a folder; None if none was evaluated.

    Scores are comparable only within one protocol: that of the first file with an evaluation in `reports`, which has
    the evaluations of a run by their folders.
    """
    paths = sorted(paths, key=lambda path: (-path.stat().st_size, path.name))
    of_digest = {report.evaluated.source.get("gguf_sha256"): report for report in reports.values()}
    of_digest.pop(None, None)
    evaluations: dict[str, Report] = {}
    for path in paths if of_digest else ():
        if report := of_digest.get(atomic.sha256(path)):
            if next(iter(evaluations.values()), report).protocol == report.protocol:
                evaluations[path.name] = report
            else:
                print(f"the evaluation of {path} has other settings than others; it is left out", file=sys.stderr)
    if not evaluations:
        return None
    first = next(iter(evaluations.values()))
    metric, sampling = next(iter(first.evaluated.scores)), first.protocol.sampling
    assert sampling is not None
    name = metric if sampling.temperature else f"greedy {metric}"
    scores = {
        file: percent(report.evaluated.scores[metric], report.evaluated.intervals[metric])
        for file, report in evaluations.items()
    }
    rows = [(path.name, disk.size(path.stat().st_size), scores.get(path.name, "–")) for path in paths]
    samples = f", mean of {sampling.num_samples} samples at temperature {sampling.temperature:g}"
    how = samples if sampling.temperature else ""
    notes = [f"{name}: percent of {first.protocol.rows} problems solved{how}, with 95% intervals."]
    notes += [report.cost for report in evaluations.values() if report.cost]
    return GgufSection(heading, first.title, (["file", "size", name], rows), notes, evaluations)


def gguf_sections(run: Path) -> list[GgufSection]:
    """Return a section for each folder of a run with measured GGUF files of the run's current adapter."""
    sections = []
    for name, heading in _FOLDERS.items():
        folder = run / name
        exported = exported_files(folder)
        adapter = adapter_sha256(source_adapter(folder)) if exported else ""
        paths = [folder / name for name, file in exported.items() if file.adapter_sha256 == adapter]
        if section := gguf_section(paths, read_reports(run) if paths else {}, heading):
            sections.append(section)
    return sections
