"""Select the completions that the page shows, as a table for its browser."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.runs import Line, RunFiles

MAX_SHOWN = 20_000
"""Maximum number of completions on one page."""

COLUMNS = (
    "source",
    "step",
    "sample_index",
    "problem",
    "completion",
    "extracted",
    "passed",
    "status",
    "tokens",
    "truncated",
    "rewards",
    "reward",
)
"""The values of a completion, in the order of a row."""

Problem = tuple[str | None, str | None, str | None]
"""Id, question and answer."""


@dataclass(frozen=True)
class CompletionTable:
    """Completions of a run. Problems and names of rewards, which repeat, are stored once."""

    rows: list[list[Any]]
    """The values of each completion in the order of COLUMNS: `source` is training, validation, base or trained,
    `problem` an index into `problems`, and `rewards` a list in the order of `rewards`, or None."""
    problems: list[Problem]
    rewards: list[str]
    """Names of the rewards in training."""
    total: int
    """Number of completions in the run, of which `rows` may be a part."""

    def to_json(self) -> str:
        """Return the table as JSON, in ASCII."""
        table = {
            "columns": COLUMNS,
            "rows": self.rows,
            "problems": self.problems,
            "rewards": self.rewards,
            "total": self.total,
        }
        return json.dumps(table, separators=(",", ":"), allow_nan=False)


def completion_table(run: RunFiles, max_shown: int = MAX_SHOWN) -> CompletionTable:
    """Return about `max_shown` completions of a run: evenly spaced, and an equal share of each step and evaluation."""
    batches = _batches(run)
    total = sum(len(batch.lines) for batch in batches)
    rewards = list(dict.fromkeys(name for line in run.completions for name in line["rewards"]))

    rows = []
    problem_indices: dict[Problem, int] = {}  # in order of occurrence
    for batch in batches:
        for line in _evenly_spaced(batch.lines, max_shown, total):
            problem = _problem(line, run.rows)
            problem_index = problem_indices.setdefault(problem, len(problem_indices))
            rows.append(_row(line, batch.source, problem_index, rewards))
    return CompletionTable(rows, list(problem_indices), rewards, total)


@dataclass(frozen=True)
class _Batch:
    """The completions of one step of training or validation, or of one evaluation."""

    source: str
    lines: list[Line]


def _batches(run: RunFiles) -> list[_Batch]:
    batches = []
    for source, lines in (("training", run.completions), ("validation", run.validation)):
        lines_by_step: dict[int, list[Line]] = {}
        for line in lines:
            lines_by_step.setdefault(line["step"], []).append(line)
        batches += [_Batch(source, step_lines) for step_lines in lines_by_step.values()]
    batches += [_Batch(model, samples) for model, samples in run.samples.items()]
    return batches


def _evenly_spaced(lines: Sequence[Line], max_shown: int, total: int) -> Sequence[Line]:
    """Return the share of the lines that is shown if at most about `max_shown` of `total` lines are."""
    if total <= max_shown:
        return lines
    num_shown = math.ceil(len(lines) * max_shown / total)
    return [lines[index * len(lines) // num_shown] for index in range(num_shown)]


def _problem(line: Line, evaluation_rows: Mapping[str, Line]) -> Problem:
    """Return the problem of a completion. Training and validation write it beside the completion."""
    if "step" in line:
        problem = line
    else:
        problem_id = line["task_id"]
        problem = {"id": problem_id, **evaluation_rows.get(problem_id, {})}
    return _text(problem.get("id")), _text(problem.get("question")), _text(problem.get("answer"))


def _row(line: Line, source: str, problem_index: int, reward_names: Sequence[str]) -> list[Any]:
    """Return the values of a completion in the order of COLUMNS."""
    completion = line["completion"]
    extracted = line.get("extracted")
    if line.get("response") is not None:  # for code tasks, `completion` is the part of it that was run
        completion = line["response"]
        extracted = line["completion"]

    rewards = None
    if "rewards" in line:
        rewards = [_finite(line["rewards"].get(name)) for name in reward_names]

    values = {
        **line,
        "source": source,
        "problem": problem_index,
        "completion": completion,
        "extracted": _text(extracted),
        "tokens": line.get("num_tokens"),
        "rewards": rewards,
    }
    return [_finite(values.get(column)) for column in COLUMNS]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON does not support them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
