"""What was measured of a model that is pushed, and nothing that was measured of other weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.evaluation import Page
from lora_grpo.files import atomic
from lora_grpo.hub.card_schema import ASKED_REPORT, OWN_REPORT, check, read_json, read_merge
from lora_grpo.hub.files import without_paths
from lora_grpo.models import adapter_sha256, base_model
from lora_grpo.tasks import TASK_NAMES, get_task

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]*[\w])?", re.ASCII)
"""What the name of a model or a data set on the Hub looks like."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of what."""

    page: Page
    of_upload: bool
    """Whether it is what is pushed that was measured; else the adapter that it was made of."""
    after: str
    """The name of the side, in `page.sides`, that the figures are of."""
    isolation: str | None = None
    """How programs were kept apart while they were graded."""
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
    for path in (run / "evaluation" / "report.json", *sorted(run.glob("evaluation/*/report.json"))):
        own = path.parent.name == "evaluation"
        try:
            how = _own_evaluation if own else _asked_evaluation
            found = how(path, run, record, folder, kind)
            if found is not None:
                found.page.markdown()  # what a card shows of it: what cannot be shown is found out here
                yield found
        except (ArithmeticError, AttributeError, LookupError, TypeError, UserError, ValueError) as error:
            print(f"{path} is no report of this version ({error}), and the card leaves it out", file=sys.stderr)


def _own_evaluation(path: Path, run: Path, record: Mapping[str, Any], folder: Path, kind: str) -> Evaluation | None:
    """Return what the run measured at its end of base and adapter."""
    if not path.is_file():
        return None
    report = without_paths(read_json(path))
    # A run that goes on keeps its last report until it has a new one, and files can be changed by hand.
    current = record.get("status") == "complete" and record["results"]["table"] == report["table"]
    wrong = atomic.damage(run / "adapter") if current else "the run has gone on since"
    if wrong:
        print(f"{path} is not of the adapter as it is now ({wrong}), and the card leaves it out", file=sys.stderr)
        return None
    check(report, OWN_REPORT)
    told = report["protocol"]
    title = f"{told['task']}: {told['rows']} held-out rows, one greedy sample each"
    if told["num_samples"]:
        how = f"temperature {told['temperature']:g}, top-p {told['top_p']:g}"
        title += f" and {told['num_samples']} at {how}"
    if told.get("left_out_as_trained_on"):
        title += f"; {told['left_out_as_trained_on']} rows were trained on and left out: not comparable"
    sides = {"base": _side(report["base"]), "trained": _side(report["trained"])}
    moved = {word: report.get(word, []) for word in ("fixed", "regressed")}
    page = Page(title, sides, told, report["table"], moved)
    source = _data_set(told["task"], record["data"]["eval"].get("source"))
    return Evaluation(page, kind == "adapter", "trained", told.get("sandbox"), source)


def _asked_evaluation(path: Path, run: Path, record: Mapping[str, Any], folder: Path, kind: str) -> Evaluation | None:
    """Return an evaluation that was asked for, if it is of what is pushed or of the adapter that it was made of."""
    raw = read_json(path)
    report, models = without_paths(raw), (raw.get("protocol") or {}).get("models") or {}
    model = models.get(raw.get("label")) or {}
    of_upload = kind != "gguf" and _is(model, folder, kind)
    of_adapter = (run / "adapter").is_dir() and _is(model, run / "adapter", "adapter")
    if not of_upload and not (kind != "adapter" and of_adapter):
        print(f"{path} is of other weights, and the card leaves it out", file=sys.stderr)
        return None
    check(report, ASKED_REPORT)
    told, other = report["protocol"], report.get("compared_with")
    how = f"temperature {told['temperature']:g}, top-p {told['top_p']:g}" if told["temperature"] else "greedy"
    title = f"{report['task']}: {told['rows']} rows, {report['samples']} samples, {how}"
    if told.get("left_out_as_trained_on"):
        title += f"; {told['left_out_as_trained_on']} rows were trained on and left out: not comparable"
    if told.get("contaminated"):
        title += "; CONTAMINATED: trained on this benchmark, the score says nothing"
    sides = {other["label"]: _side(other)} if other else {}
    sides[report["label"]] = _side(report)
    moved = {word: report.get(word, []) for word in ("fixed", "regressed")} if other else None
    page = Page(title, sides, told, report.get("table", ()), moved)
    asked = read_json(path.with_name("evaluation.json")).get("asked")
    source = asked["options"].get("data") if asked else None
    if asked and source is None and report["task"] == record["data"].get("eval_task"):
        source = record["data"]["eval"].get("source")
    return Evaluation(
        page, of_upload, report["label"], report.get("isolation"), _data_set(report["task"], source) if asked else None
    )


def _side(side: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured of one model, whose names of figures are free and so in no schema."""
    check(side, dict.fromkeys(side["intervals"], (int, float)))
    return side


def _is(model: Mapping[str, Any], folder: Path, kind: str) -> bool:
    """Tell whether an evaluation's model is what is in a folder."""
    if kind == "adapter":
        return bool(model.get("adapter_sha256") == adapter_sha256(folder))
    same_weights = model.get("weights_sha256") == base_model.weights_fingerprint(folder)
    return model.get("adapter_sha256") is None and same_weights


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
