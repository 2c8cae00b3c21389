"""What was measured of a model that is pushed, and nothing that was measured of other weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.evaluation import Report, Source, read_report
from lora_grpo.hub.card_schema import read_merge
from lora_grpo.hub.files import without_paths
from lora_grpo.models import adapter_sha256, base_model
from lora_grpo.tasks import TASK_NAMES, get_task

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]*[\w])?", re.ASCII)
"""What the name of a model or a data set on the Hub looks like."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of what."""

    report: Report
    of_upload: bool
    """Whether it is what is pushed that was measured; else the adapter that it was made of."""
    source: str | None = None
    """The Hub data set of the rows; None where they were files or generated."""


def evaluations_of(run: Path, record: Mapping[str, Any], folder: Path, kind: str) -> Iterator[Evaluation]:
    """Yield the run's own evaluation, then those of scripts/evaluate.py in its folder.

    Figures of other weights are left out, and that is said.

    Args:
        run: the run's folder.
        record: its run.json.
        folder: what is pushed.
        kind: which of `upload_files.KINDS` it is.
    """
    made_of = (read_merge(folder).get("adapter") or {}).get("sha256")
    if made_of and made_of != adapter_sha256(run / "adapter"):
        print(f"{folder} was made of another adapter than the run has now; its figures are left out", file=sys.stderr)
        return
    if kind != "adapter" and not made_of and _is_older(folder, run / "adapter"):
        print(f"{folder} is older than the run's adapter, whose figures are left out", file=sys.stderr)
        return
    for path in (run / "evaluation", *sorted((run / "evaluation").glob("*/"))):
        try:
            report = read_report(path)
        except UserError as error:
            print(f"{error}; the card leaves it out", file=sys.stderr)
            continue
        if report is None or report.protocol.sampling is None:
            continue
        of_upload = kind != "gguf" and _is(report.evaluated.source, folder, kind)
        of_adapter = (run / "adapter").is_dir() and _is(report.evaluated.source, run / "adapter", "adapter")
        if not of_upload and not (kind != "adapter" and of_adapter):
            print(f"{path / 'report.json'} is of other weights, and the card leaves it out", file=sys.stderr)
            continue
        source = report.protocol.data_source
        if source is None and report.protocol.task == record["data"].get("eval_task"):
            source = record["data"]["eval"].get("source")
        report = Report.model_validate(without_paths(report.model_dump()))
        yield Evaluation(report, of_upload, _data_set(report.protocol.task, source))


def _is(model: Source, folder: Path, kind: str) -> bool:
    """Tell whether an evaluation's model is what is in a folder."""
    if kind == "adapter":
        return model.adapter_sha256 == adapter_sha256(folder)
    return model.adapter_sha256 is None and model.weights_sha256 == base_model.weights_fingerprint(folder)


def _is_older(folder: Path, adapter: Path) -> bool:
    """Tell whether an adapter has been written since a model was made, which then is of an earlier one."""
    made = max(path.stat().st_mtime for path in folder.glob("*"))
    return any(path.stat().st_mtime > made for path in adapter.glob("*.safetensors"))


def _data_set(task: str, source: str | None) -> str | None:
    """Return the Hub data set that rows came from, where that is certain: the task's own."""
    own = getattr(get_task(task), "HUB_DATASET", None) if task in TASK_NAMES else None
    # Whether another name was of the Hub or of a folder is written nowhere, and a folder's name is nobody's business.
    return own if source in (None, own) else None


def data_sets(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the Hub data sets of a run's rows, by split."""
    data = record["data"]
    tasks = {"train": data.get("task"), "eval": data.get("eval_task")}
    return {split: _data_set(str(task), (data.get(split) or {}).get("source")) for split, task in tasks.items()}
