"""The files of an evaluation: results.jsonl (one graded sample per line) and evaluation.json (its settings).

A folder contains one evaluation. An evaluation with other settings needs another folder. Only the baseline
may change; its results have their own file.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, json_files
from lora_grpo.grading import Verdict
from lora_grpo.progress import Progress
from lora_grpo.rollouts import Episode
from lora_grpo.tasks import CODE_TASKS

Result = dict[str, Any]
"""`task_id` and `completion` (both in the format of HumanEval's harness), `passed`, `result` (the harness's message),
`status` (the reason for the verdict), `score` (partial credit, if the task gives any), `read_from` (where the answer
was found, if the task reads several places), and every rule of the task. This package's samples also have
`sample_index` ("greedy" or a number), `num_tokens` and `truncated`. They have `response`, the model's text, if
`completion` is only a part of it. A conversation also has its `messages`, its numbers of `turns`, `tool_calls` and
`failed_calls`, and what it was `ended_by`. `failure` says why an agent failed; see `has_failed`.
"""
Request = Mapping[str, Any]
"""Everything that determines the samples and verdicts of an evaluation, as plain JSON values."""

RULES = ("strict", "flexible", "robust")
GRADES = ("score", "read_from", *RULES)
"""The entries of a result that only some tasks provide. Samples from other tools may use them with another meaning."""
GREEDY = "greedy"
"""The `sample_index` of a problem's greedy sample. All other samples are numbered from 0, also if they were sampled at
temperature 0."""
STATE = "evaluation.json"
RESULTS = "results.jsonl"


# One result


def problem_id(row: Mapping[str, Any]) -> str:
    """Return a row's id as other harnesses spell it. For example, EvalPlus uses `Mbpp/11`."""
    name = str(row["id"])
    if name.startswith("mbpp/"):
        return f"Mbpp/{name.removeprefix('mbpp/')}"
    return name


def is_greedy(result: Mapping[str, Any]) -> bool:
    """Return whether a sample is its problem's greedy sample, which has no number. See `GREEDY`."""
    return result.get("sample_index") == GREEDY


def has_failed(result: Mapping[str, Any]) -> bool:
    """Return whether the agent of an episode failed. Such a result says nothing about the model, and counts nowhere.

    Args:
        result: a line of results.jsonl, or of the log of a run's completions.
    """
    return "failure" in result


def verdict_entries(verdict: Verdict) -> Result:
    """Return the entries of a result that come from the verdict."""
    status = verdict.reason
    if verdict.passed:
        message = "passed"
        status = "passed"
    elif verdict.reason == "timeout":
        message = "timed out"
    else:
        message = f"failed: {verdict.detail or verdict.reason}"
    entries: Result = {"passed": verdict.passed, "result": message, "status": status}
    if verdict.score is not None:
        entries["score"] = verdict.score
    if verdict.read_from is not None:
        entries["read_from"] = verdict.read_from
    return {**entries, **verdict.rules}


def episode_result(task: str, sample_index: str | int, episode: Episode, verdict: Verdict) -> Result:
    """Return the result of a graded episode.

    Args:
        sample_index: "greedy" or the number of the sample.
    """
    response = episode.text
    completion = response
    if task in CODE_TASKS:  # the program that was run, without the prompt that a harness prepends
        prefix = episode.row.get("completion_prefix") or ""
        completion = (verdict.extracted or "").removeprefix(prefix)
    result: Result = {"task_id": problem_id(episode.row), "sample_index": sample_index, "completion": completion}
    result |= verdict_entries(verdict)
    if completion != response:
        result["response"] = response
    elif verdict.extracted is not None:
        result["extracted"] = verdict.extracted
    if episode.session or episode.agent:
        result["messages"] = episode.messages
        result["turns"] = episode.turns
        result["ended_by"] = episode.ended_by
    if episode.session:
        result["tool_calls"] = episode.session.calls
        result["failed_calls"] = episode.session.failed_calls
    if episode.failure:
        result["failure"] = episode.failure
    result["num_tokens"] = sum(episode.loss_mask)
    result["truncated"] = episode.truncated
    return result


# The file of results


def append_batches(
    path: Path, finished: Sequence[Result], batches: Iterable[list[Result]], total: int, title: str
) -> list[Result]:
    """Append batches of results to a file as they are produced, and show the progress.

    Args:
        finished: the results that the file already has.
        total: number of results when all batches are done.
        title: of the progress line.

    Returns:
        All results.
    """
    results = list(finished)
    # By whether they are greedy, because the others have another pass rate.
    num_samples = Counter(is_greedy(result) for result in finished if not has_failed(result))
    num_passed = Counter(is_greedy(result) for result in finished if result["passed"])
    if finished:
        console.note(f"{path}: {len(finished)} of {total} samples are done")
    with contextlib.closing(Progress(total, title)) as progress:
        for batch in batches:
            json_files.append_lines(path, batch)
            results += batch
            num_samples.update(is_greedy(result) for result in batch if not has_failed(result))
            num_passed.update(is_greedy(result) for result in batch if result["passed"])
            greedy = is_greedy(batch[-1])
            rate = num_passed[greedy] / max(1, num_samples[greedy])
            which = " of greedy ones" if greedy else ""
            progress.show(len(results), f"{rate:.1%}{which} pass")
    return results


# The settings


@dataclass(frozen=True)
class _Entry:
    """The entry of one results file in evaluation.json."""

    request: dict[str, Any]
    environment: dict[str, Any]
    """Versions and hardware."""


def digest(request: Request) -> str:
    """Return a hash of a request: 8 hexadecimal digits."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:8]


def check_folder(folder: Path, request: Request) -> None:
    """Raise UserError if a folder contains another evaluation or other files."""
    state = _read_state(folder)
    if not state and folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(f"{folder} contains files that are not an evaluation; pass another --output-dir")
    if RESULTS not in state:
        return
    before = state[RESULTS]["request"]
    changes = []
    for name in sorted(before.keys() | request.keys()):
        old = before.get(name)
        new = request.get(name)
        if old != new:
            changes.append(f"{name} was {json.dumps(old):.40}, now {json.dumps(new):.40}")
    if changes:
        raise UserError(
            f"{folder} contains another evaluation: {'; '.join(changes)}; pass another --output-dir, or delete it"
        )


def environment_of(path: Path) -> dict[str, Any] | None:
    """Return the versions and hardware that `start` recorded for a results file, or None."""
    return _read_state(path.parent).get(path.name, {}).get("environment")


def start(path: Path, request: Request, environment: Mapping[str, Any]) -> None:
    """Record the request and environment of a results file."""
    state = _read_state(path.parent)
    state[path.name] = {"request": request, "environment": environment}
    atomic.write_json(path.parent / STATE, state)


def _read_state(folder: Path) -> dict[str, Any]:
    """Return the content of evaluation.json: an `_Entry` by the name of a results file."""
    path = folder / STATE
    if not path.exists():
        return {}
    state = json_files.read_object(path)
    json_files.validated(state, dict[str, _Entry], f"{path} is damaged", "pass another --output-dir")
    return state
