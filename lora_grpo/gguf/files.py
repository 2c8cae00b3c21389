"""The GGUF files of a folder: the adapter that each was made from, and a table of size and quality."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo import console
from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, percent, read_reports
from lora_grpo.files import atomic, disk
from lora_grpo.merging import read_report
from lora_grpo.models import adapter_sha256, source_adapter
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
    table: tuple[list[str], list[tuple[str, str, str]]]
    """Headings, and a row for each file: size and first score."""
    notes: list[str]
    """A description of the score, and the quality loss of each evaluated file."""
    evaluations: dict[str, Report]
    """Evaluations of the files, by name, the largest file first."""


def _made_from(path: Path) -> str | None:
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
    merge, adapter = read_report(folder), source_adapter(folder)
    expected = merge.identity.get("adapter_sha256") if merge else None
    if (folder.parent / "run.json").is_file() and adapter.is_dir():
        expected = adapter_sha256(adapter)
    for path in sorted(folder.glob("*.gguf")) if expected else ():
        if _made_from(path) != expected:
            raise UserError(
                f"{path} was made from another adapter than {adapter}, or not here; run {command('export-gguf')} "
                "again, or move or delete the file"
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
                console.note(f"the evaluation of {path} has other settings than others; it is left out")
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
        files, adapter = [*(run / name).glob("*.gguf")], source_adapter(run / name)
        reports = read_reports(run) if files and adapter.is_dir() else {}
        if any("gguf_sha256" in report.evaluated.source for report in reports.values()):
            paths = [path for path in files if _made_from(path) == adapter_sha256(adapter)]
            sections.append(gguf_section(paths, reports, heading))
    return [section for section in sections if section]
