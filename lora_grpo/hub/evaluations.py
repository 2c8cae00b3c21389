"""Find the evaluations of a run that measured the pushed weights or the adapter that they were made from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, read_report
from lora_grpo.hub.files import without_paths
from lora_grpo.models import adapter_sha256, base_model
from lora_grpo.tasks import TASK_NAMES, get_task


@dataclass(frozen=True)
class Evaluation:
    """An evaluation and the weights that it measured."""

    report: Report
    of_upload: bool
    """Whether the uploaded weights were measured. If not, the adapter that they were made from was measured."""
    dataset: str | None
    """The Hub dataset of the rows; None for files and generated rows."""


def evaluations_of(run: Path, folder: Path, kind: str, merge: Mapping[str, Any] | None) -> Iterator[Evaluation]:
    """Yield the evaluations in a run's folder, and print the name of each one that measured other weights.

    Args:
        run: the run's folder.
        folder: the folder being pushed.
        kind: one of `files.KINDS`.
        merge: the folder's merge_report.json.
    """
    adapter = run / "adapter"
    current = adapter_sha256(adapter)
    made_from_adapter = merge is not None and merge["identity"].get("adapter_sha256") == current
    for path in (run / "evaluation", *sorted((run / "evaluation").glob("*/"))):
        try:
            report = read_report(path)
        except UserError as error:
            print(f"{error}; the card leaves it out", file=sys.stderr)
            continue
        if report is None or report.protocol.sampling is None:
            continue
        of_adapter = report.evaluated.source.get("adapter_sha256") == current
        of_upload = of_adapter if kind == "adapter" else kind == "merged" and _is_model(report, folder)
        if of_upload or (of_adapter and made_from_adapter):
            dataset = dataset_of(report.protocol.task, report.protocol.data_source)
            yield Evaluation(Report.model_validate(without_paths(report.model_dump())), of_upload, dataset)
        else:
            print(f"{path}/report.json measured other weights; the card leaves it out", file=sys.stderr)


def _is_model(report: Report, folder: Path) -> bool:
    measured = report.evaluated.source
    return not measured.get("adapter_sha256") and measured.get("weights_sha256") == base_model.weights_fingerprint(
        folder
    )


def dataset_of(task: str | None, source: str | None) -> str | None:
    """Return the Hub dataset of a task's rows, or None if the rows come from another source."""
    own = getattr(get_task(task), "HUB_DATASET", None) if task and task in TASK_NAMES else None
    return own if source in (None, own) else None
