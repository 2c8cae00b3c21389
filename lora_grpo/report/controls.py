"""The controls of a run (`--control`): equal runs with the format rewards only, or with random rewards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lora_grpo.config import control_folder, controlled_folder
from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, read_report
from lora_grpo.runs import RunFiles, flat, read_record

CONTROLS = {"format": "format rewards only", "random": "random rewards"}
"""What each control trains on."""
_MAY_DIFFER = ("output_dir", "control", "rewards")


def compared(run: RunFiles, evaluation: Report | None) -> tuple[list[str], list[tuple[str, ...]]] | None:
    """Return a table of the gains of a run and its finished controls; None if it has none."""
    if evaluation is None or not evaluation.table:
        return None
    metric = evaluation.table[0].metric
    found = [("the run", evaluation), *((CONTROLS[name], report) for name, _, report in _finished(run))]
    rows = [(name, *row.cells()[1:]) for name, report in found for row in report.table if row.metric == metric]
    return ([metric, "before", "trained", "gain", "p"], rows) if len(rows) > 1 else None


def notes(run: RunFiles) -> list[str]:
    """Return a sentence for each finished control with other settings than the run."""
    sentences, own = [], flat(run.record["config"])
    for name, folder, _ in _finished(run):
        other = flat(read_record(folder)["config"])
        names = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
        if differing := [key for key in names if key not in _MAY_DIFFER]:
            sentences.append(f"The control with {CONTROLS[name]} has other settings: {', '.join(differing)}.")
    return sentences


def controlled_run(folder: Path) -> Path | None:
    """Return the folder of the run that a run is the control of; None if it is not a control or has no run."""
    control = read_record(folder)["config"].get("control")
    path = str(folder.resolve())
    run = Path(controlled_folder(path, control))
    return run if control and run != Path(path) and (run / "run.json").is_file() else None


def _finished(run: RunFiles) -> Iterator[tuple[str, Path, Report]]:
    """Yield name, folder and report of each control with a report that can be read."""
    if run.record["config"].get("control"):
        return
    for name in CONTROLS:
        folder = Path(control_folder(os.fspath(run.folder.resolve()), name))
        try:
            report = read_report(folder / "evaluation") if (folder / "run.json").is_file() else None
        except UserError:  # of another version, or damaged: the command that reads that run says so
            continue
        if report:
            yield name, folder, report
