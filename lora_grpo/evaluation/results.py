"""Graded samples, which are the lines of results.jsonl."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.files import json_files
from lora_grpo.progress import Progress
from lora_grpo.sampling import SampledTokens
from lora_grpo.tasks import CODE_TASKS, Row, Verdict

Result = dict[str, Any]
"""`task_id` and `completion` (both in the format of HumanEval's harness), `passed`, `result` (the harness's message),
`status` (the reason for the verdict), `score` (partial credit, if the task gives any), `read_from` (where the answer
was found, if the task reads several places), and every rule of the task. This package's samples also have `draw`
("greedy" or a number), `num_tokens` and `truncated`. They have `response`, the model's text, if `completion` is only a
part of it.
"""

RULES = ("strict", "flexible", "robust")
READ_FROM = ("marker", "statement")
GRADES = ("score", "read_from", *RULES)
"""The entries of a result that only some tasks have. Samples from other tools may use them with another meaning."""
GREEDY = "greedy"
"""The `draw` of a greedy sample in a file that also has numbered samples."""


def append(path: Path, kept: Sequence[Result], new: Iterable[list[Result]], total: int, title: str) -> list[Result]:
    """Append batches of new results to those kept in a file, and show the progress. Return all results."""
    results, passed = [*kept], sum(result["passed"] for result in kept)
    if kept:
        print(f"{path}: {len(kept)} of {total} samples are done", file=sys.stderr)
    progress = Progress(total, title)
    with contextlib.closing(progress):
        for batch in new:
            json_files.append_lines(path, batch)
            results += batch
            passed += sum(result["passed"] for result in batch)
            progress.show(len(results), f"{passed / len(results):.1%} pass")
    return results


def outcome(verdict: Verdict) -> Result:
    """Return the entries of a result that come from the verdict."""
    if verdict.passed:
        message, status = "passed", "passed"
    else:
        message = "timed out" if verdict.reason == "timeout" else f"failed: {verdict.detail or verdict.reason}"
        status = verdict.reason
    score = {} if verdict.score is None else {"score": verdict.score}
    read = {} if verdict.read_from is None else {"read_from": verdict.read_from}
    return {"passed": verdict.passed, "result": message, "status": status, **score, **read, **verdict.rules}


def sampled(task: str, row: Row, draw: str | int, sample: SampledTokens, verdict: Verdict) -> Result:
    """Return the result of a sampled completion. `draw` is "greedy" or the number of the sample."""
    completion = response = sample.text
    if task in CODE_TASKS:  # the program that was run, without the prompt that a harness prepends
        completion = (verdict.extracted or "").removeprefix(row.get("completion_prefix") or "")
    result: Result = {"task_id": task_id(row), "draw": draw, "completion": completion, **outcome(verdict)}
    if completion != response:
        result["response"] = response
    elif verdict.extracted is not None:
        result["extracted"] = verdict.extracted
    return result | {"num_tokens": len(sample.token_ids), "truncated": sample.truncated}


def task_id(row: Mapping[str, Any]) -> str:
    """Return a row's id as other harnesses spell it. For example, EvalPlus uses `Mbpp/11`."""
    name = str(row["id"])
    return f"Mbpp/{name.removeprefix('mbpp/')}" if name.startswith("mbpp/") else name
