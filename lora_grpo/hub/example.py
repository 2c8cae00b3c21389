"""Choose one evaluation problem with an answer from before and after training, by a rule and not by taste.

It is the first problem in the order of the evaluation rows whose answer was wrong before and is right after. The answer
of a problem is its greedy sample or, in an evaluation without greedy samples, its first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.evaluation import Report, Result
from lora_grpo.files import json_files
from lora_grpo.tasks import TASK_NAMES, get_task


@dataclass(frozen=True)
class Example:
    """A fixed problem. All texts are of a data set or a model, and must not be rendered."""

    question: str
    before: str
    after: str
    is_greedy: bool
    fixed: int
    """Number of problems whose answer went from wrong to right."""
    regressed: int
    """Number of problems whose answer went from right to wrong."""
    problems: int


def find(run: Path, evaluation: Path, report: Report) -> Example | None:
    """Return the example of an evaluation of a run.

    Returns None if no problem was fixed, if samples of either model are missing, or if the rows are not those of a
    built-in task: a row from a user's file may be private.
    """
    sampling = report.protocol.sampling
    if (
        report.baseline is None
        or sampling is None
        or own_dataset(report.protocol.task, report.protocol.data_source) is None
    ):
        return None
    paths = [evaluation / "base.samples.jsonl", evaluation / "trained.samples.jsonl"]
    if not paths[0].is_file():  # of `lora-grpo evaluate`
        compared = [*evaluation.glob("compared-*.results.jsonl")]
        if len(compared) != 1:
            return None
        paths = [*compared, evaluation / "results.jsonl"]
    before, after = (_answers(json_files.read_finished_lines(path)) for path in paths)
    rows = [row for row in json_files.read_finished_lines(run / "evaluation" / "rows.jsonl") if isinstance(row, dict)]
    questions = {str(row.get("task_id")): str(row.get("question")) for row in rows}
    if not before or before.keys() != after.keys() or not before.keys() <= questions.keys():
        return None
    fixed = [name for name in questions if name in before and not before[name]["passed"] and after[name]["passed"]]
    if not fixed:
        return None
    first = fixed[0]
    return Example(
        question=questions[first],
        before=_text(before[first]),
        after=_text(after[first]),
        is_greedy=_is_greedy(before[first]) or sampling.temperature == 0,
        fixed=len(fixed),
        regressed=sum(before[name]["passed"] and not after[name]["passed"] for name in before),
        problems=len(before),
    )


def own_dataset(task: str | None, source: str | None) -> str | None:
    """Return the Hub dataset of a task, "" for a task with bundled rows, or None if the rows are from elsewhere."""
    if task not in TASK_NAMES:
        return None
    own = getattr(get_task(task), "HUB_DATASET", "")
    return own if source in (None, own) else None


def _answers(results: list[Any]) -> Mapping[str, Result]:
    """Return the greedy sample of each problem, or else the first one."""
    found: dict[str, Result] = {}
    for result in results:
        if isinstance(result, dict) and isinstance(result.get("passed"), bool):
            name = str(result.get("task_id"))
            if name not in found or (_is_greedy(result) and not _is_greedy(found[name])):
                found[name] = result
    return found


def _is_greedy(result: Result) -> bool:
    return result.get("draw") == "greedy"


def _text(result: Result) -> str:
    return str(result.get("response", result.get("completion")))
