"""One graded sample, which is one line of results.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.tasks import CODE_TASKS, Row, Verdict

Result = dict[str, Any]
"""`task_id` and `completion` (both in the format of HumanEval's harness), `passed`, `result` (the harness's message),
`status` (the reason for the verdict), and every rule of the task. This package's samples also have `draw` ("greedy" or
a number), `num_tokens` and `truncated`. They have `response`, the model's text, if `completion` is only a part of it.
"""

GREEDY = "greedy"
"""The `draw` of a greedy sample in a file that also has numbered samples."""


def outcome(verdict: Verdict) -> Result:
    """Return the entries of a result that come from the verdict."""
    if verdict.passed:
        message, status = "passed", "passed"
    else:
        message = "timed out" if verdict.reason == "timeout" else f"failed: {verdict.detail or verdict.reason}"
        status = verdict.reason
    return {"passed": verdict.passed, "result": message, "status": status, **verdict.rules}


def sampled(task: str, row: Row, draw: str | int, response: str, verdict: Verdict) -> Result:
    """Return a sample with its verdict.

    Args:
        task: name of the task.
        row: the row that the sample answers.
        draw: "greedy" or the number of the sample.
        response: the model's text.
        verdict: the verdict of the task's grader.
    """
    completion = response
    if task in CODE_TASKS:  # the program that was run, without the prompt that a harness prepends
        completion = (verdict.extracted or "").removeprefix(row.get("completion_prefix") or "")
    result: Result = {"task_id": task_id(row), "draw": draw, "completion": completion, **outcome(verdict)}
    if completion != response:
        result["response"] = response
    elif verdict.extracted is not None:
        result["extracted"] = verdict.extracted
    return result


def task_id(row: Mapping[str, Any]) -> str:
    """Return a row's id as other harnesses spell it. For example, EvalPlus uses `Mbpp/11`."""
    name = str(row["id"])
    return f"Mbpp/{name.removeprefix('mbpp/')}" if name.startswith("mbpp/") else name
