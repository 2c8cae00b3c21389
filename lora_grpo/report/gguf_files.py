"""The GGUF files of a run: the size of each type, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_grpo.evaluation import read_reports
from lora_grpo.gguf import current_files, files_legend, files_notes, files_table, measured_files

_FOLDERS = {"gguf": "GGUF files", "best-gguf": "GGUF files of the best adapter"}


@dataclass(frozen=True)
class GgufSection:
    """A table of GGUF files that were made from one adapter."""

    heading: str
    title: str | None
    """Task, number of samples and sampling settings; None if no file was evaluated."""
    table: tuple[list[str], list[tuple[str, ...]]]
    """Headings and rows."""
    notes: list[str]


def gguf_sections(run: Path) -> list[GgufSection]:
    """Return a section for each folder of a run with measured GGUF files of the adapter that is in the run now."""
    found = {heading: paths for folder, heading in _FOLDERS.items() if (paths := current_files(run / folder))}
    reports = read_reports(run) if found else {}
    sections = []
    for heading, paths in found.items():
        if files := measured_files(paths, reports):
            title = next((file.report.title for file in files if file.report), None)
            notes = [files_legend(files), *files_notes(files)]
            sections.append(GgufSection(heading, title, files_table(files), notes))
    return sections
