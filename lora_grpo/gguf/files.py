"""The GGUF files of a folder: the adapter that each was made from, and a table of size and quality."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo import console
from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, percent, read_reports
from lora_grpo.files import atomic, disk
from lora_grpo.merging import REPORT, read_report, source_adapter
from lora_grpo.models import adapter_sha256
from lora_grpo.sampling import read_header

ADAPTER_KEY = "lora_grpo.adapter_sha256"
"""Key in a GGUF file: the digest of the adapter that was merged into the model."""
_FOLDERS = {"gguf": "GGUF files", "best-gguf": "GGUF files of the best adapter"}


@dataclass(frozen=True)
class GgufSection:
    """A table of the GGUF files of a folder, with the measurements of evaluations."""

    heading: str
    title: str
    """Task, number of samples and sampling settings."""
    headings: tuple[str, str, str]
    rows: list[tuple[str, str, str]]
    """Name, size and first score of each file."""
    notes: list[str]
    """A description of the score, and the quality loss of each evaluated file."""
    evaluations: dict[str, Report]
    """Evaluations of the files, by name, the largest file first."""


def _adapter_digest(path: Path) -> str | None:
    """Return the digest of the adapter that a file was made from; None if it is unknown or the file is damaged."""
    try:
        field = read_header(path).get_field(ADAPTER_KEY)
    except UserError:
        return None
    return field.contents() if field else None


def check_exported(folder: Path) -> None:
    """Raise a UserError if a file of a folder was made from another adapter than its card describes.

    The card describes the run that the folder is in, or the merge of the merge_report.json in it. Without both, any
    file is accepted.
    """
    folder = folder.resolve()
    merge = read_report(folder)
    adapter = source_adapter(folder)
    if adapter and adapter.is_dir():
        described_adapter = adapter_sha256(adapter)
        name = str(adapter)
    elif merge and "adapter_sha256" in merge.identity:
        described_adapter = merge.identity["adapter_sha256"]
        name = f"that of {folder / REPORT}"
    else:
        return
    for path in sorted(folder.glob("*.gguf")):
        if _adapter_digest(path) != described_adapter:
            raise UserError(
                f"{path} was made from another adapter than {name}, or not here; run {command('export-gguf')} "
                "again, or move or delete the file"
            )


def gguf_section(paths: Sequence[Path], reports: Mapping[Path, Report], heading: str = "") -> GgufSection | None:
    """Describe the GGUF files of a folder; None if none was evaluated.

    Args:
        paths: the files.
        reports: the evaluations of a run by their folders.
        heading: title of the section, if a page has several.
    """
    paths = sorted(paths, key=lambda path: (-path.stat().st_size, path.name))
    evaluations = _evaluations(paths, reports)
    if not evaluations:
        return None
    first = next(iter(evaluations.values()))
    metric = next(iter(first.evaluated.scores))
    sampling = first.protocol.sampling
    assert sampling is not None

    metric_name = metric if sampling.temperature else f"greedy {metric}"
    rows = []
    for path in paths:
        score = "–"
        if path.name in evaluations:
            evaluated = evaluations[path.name].evaluated
            score = percent(evaluated.scores[metric], evaluated.intervals[metric])
        rows.append((path.name, disk.size(path.stat().st_size), score))

    samples = ""
    if sampling.temperature:
        samples = f", mean of {sampling.num_samples} samples at temperature {sampling.temperature:g}"
    notes = [f"{metric_name}: percent of {first.protocol.rows} problems solved{samples}, with 95% intervals."]
    notes += [report.cost for report in evaluations.values() if report.cost]
    return GgufSection(
        heading=heading,
        title=first.title,
        headings=("file", "size", metric_name),
        rows=rows,
        notes=notes,
        evaluations=evaluations,
    )


def _evaluations(paths: Sequence[Path], reports: Mapping[Path, Report]) -> dict[str, Report]:
    """Return the evaluations of files by the names of the files.

    Scores are comparable only within one protocol: that of the first file with an evaluation.
    """
    report_of_digest = {}
    for report in reports.values():
        digest = report.evaluated.source.get("gguf_sha256")
        if digest is not None:
            report_of_digest[digest] = report
    if not report_of_digest:
        return {}  # the digest of a file takes time

    evaluations: dict[str, Report] = {}
    protocol = None
    for path in paths:
        file_report = report_of_digest.get(atomic.sha256(path))
        if file_report is None:
            continue
        if protocol is None:
            protocol = file_report.protocol
        if file_report.protocol == protocol:
            evaluations[path.name] = file_report
        else:
            console.note(f"the evaluation of {path} has other settings than others; it is left out")
    return evaluations


def gguf_sections(run: Path) -> list[GgufSection]:
    """Return a section for each folder of a run with measured GGUF files of the run's current adapter."""
    sections = []
    for name, heading in _FOLDERS.items():
        files = list((run / name).glob("*.gguf"))
        adapter = source_adapter(run / name)
        if not files or adapter is None or not adapter.is_dir():
            continue
        reports = read_reports(run)
        if not any("gguf_sha256" in report.evaluated.source for report in reports.values()):
            continue
        current = [path for path in files if _adapter_digest(path) == adapter_sha256(adapter)]
        section = gguf_section(current, reports, heading)
        if section:
            sections.append(section)
    return sections
