"""One graded sample, as a line of results.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.tasks import CODE_TASKS, Row, Verdict

Result = dict[str, Any]
"""`task_id`, `completion` (both as HumanEval's own harness reads them), `passed`, `result` in the harness's words,
`status` (the verdict's reason), and every rule of the task. A sample of this kit also has `draw` ("greedy" or its
number), `num_tokens` and `truncated`, and `response`, the model's text, if the completion is a part of it.
"""

GREEDY = "greedy"
"""The `draw` of a greedily decoded sample that stands beside sampled ones."""


def outcome(verdict: Verdict) -> Result:
    """Return the entries that a verdict adds to a sample."""
    if verdict.passed:
        message, status = "passed", "passed"
    else:
        message = "timed out" if verdict.reason == "timeout" else f"failed: {verdict.detail or verdict.reason}"
        status = verdict.reason
    return {"passed": verdict.passed, "result": message, "status": status, **verdict.rules}


def sampled(task: str, row: Row, draw: str | int, response: str, verdict: Verdict) -> Result:
    """Return a sample with its verdict.

    Args:
        task: the task that graded it.
        row: the row it answers.
        draw: "greedy" or the number of the sample.
        response: the model's text.
        verdict: the verdict of the task's grader.
    """
    completion = response
    if task in CODE_TASKS:  # the program that ran, without the prompt that a harness prepends
        completion = (verdict.extracted or "").removeprefix(row.get("completion_prefix") or "")
    result: Result = {"task_id": task_id(row), "draw": draw, "completion": completion, **outcome(verdict)}
    if completion != response:
        result["response"] = response
    elif verdict.extracted is not None:
        result["extracted"] = verdict.extracted
    return result


def task_id(row: Mapping[str, Any]) -> str:
    """Return a row's id in the spelling of other harnesses: EvalPlus has `Mbpp/11`."""
    name = str(row["id"])
    return f"Mbpp/{name.removeprefix('mbpp/')}" if name.startswith("mbpp/") else name
