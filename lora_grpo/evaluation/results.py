"""One graded sample, as files of samples and of results hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.tasks import CODE_TASKS, Row, Verdict

Result = dict[str, Any]
"""`task_id`, `completion` (both as HumanEval's own harness reads them), `passed`, `result` in the harness's words,
`status` (the verdict's reason), and every rule of the task. A sample that the kit drew has `draw` ("greedy" or its
number), `num_tokens` and `truncated` besides, and `response`, the model's text, where the completion is a part of it.
"""

GREEDY = "greedy"
"""The `draw` of a greedily decoded sample that stands beside sampled ones."""


def outcome(verdict: Verdict) -> Result:
    """Return what a verdict adds to a sample."""
    if verdict.passed:
        said, status = "passed", "passed"
    else:
        said = "timed out" if verdict.reason == "timeout" else f"failed: {verdict.detail or verdict.reason}"
        status = verdict.reason
    return {"passed": verdict.passed, "result": said, "status": status, **verdict.rules}


def drawn(task: str, row: Row, draw: str | int, response: str, verdict: Verdict) -> Result:
    """Return a sample that the kit drew, with its verdict.

    Args:
        task: the task that graded it.
        row: what was asked.
        draw: "greedy" or the sample's number.
        response: the model's text.
        verdict: what the grader found in it.
    """
    completion = response
    if task in CODE_TASKS:  # the program that ran, less the prompt that a harness puts before it
        completion = (verdict.extracted or "").removeprefix(row.get("completion_prefix") or "")
    result: Result = {"task_id": task_id(row), "draw": draw, "completion": completion, **outcome(verdict)}
    if completion != response:
        result["response"] = response
    elif verdict.extracted is not None:
        result["extracted"] = verdict.extracted
    return result


def task_id(row: Mapping[str, Any]) -> str:
    """Return a row's id as other harnesses spell it: EvalPlus has `Mbpp/11`."""
    name = str(row["id"])
    return f"Mbpp/{name.removeprefix('mbpp/')}" if name.startswith("mbpp/") else name
