"""A completion with its verdict and every reward, as one line of a run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.results import outcome
from lora_grpo.tasks import UNGRADED_TASKS, Row, Verdict, grade_all


def completion_lines(
    rows: Sequence[Row],
    completions: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    rewards: Sequence[Mapping[str, float | None]],
    weights: Mapping[str, float],
    eos_token_ids: Sequence[int],
) -> list[dict[str, Any]]:
    """Grade completions and write down what each is and earned.

    Args:
        rows: B rows of one task, the one that each completion answers.
        completions: B texts.
        token_ids: B completions in tokens, with the end-of-sequence token where there was one.
        rewards: B times each reward's value by name, before its scale; None where it cannot grade the row.
        weights: scale of each reward by name.
        eos_token_ids: the tokens that end a completion.

    Returns:
        B lines. `reward` is the scaled sum; `passed`, `status` and `extracted` are the grader's, None where there is no
        right answer.
    """
    verdicts = _verdicts(rows, completions)
    lines = []
    for row, completion, ids, earned, verdict in zip(rows, completions, token_ids, rewards, verdicts, strict=True):
        lines.append(
            {
                "id": row["id"],
                "question": row["question"],
                "answer": row.get("answer"),
                "completion": completion,
                "extracted": verdict.extracted if verdict else None,
                "passed": verdict.passed if verdict else None,
                "status": outcome(verdict)["status"] if verdict else None,
                "num_tokens": len(ids),
                "truncated": not ids or ids[-1] not in eos_token_ids,
                "rewards": dict(earned),
                "reward": sum(weights[name] * (value or 0.0) for name, value in earned.items()),
            }
        )
    return lines


def _verdicts(rows: Sequence[Row], completions: Sequence[str]) -> list[Verdict | None]:
    gradable = [
        place for place, row in enumerate(rows) if row["task"] not in UNGRADED_TASKS and row.get("answer") is not None
    ]
    found: list[Verdict | None] = [None] * len(rows)
    if gradable:
        asked = [rows[place] for place in gradable]
        graded = grade_all(asked[0]["task"], [completions[place] for place in gradable], asked)
        for place, verdict in zip(gradable, graded, strict=True):
            found[place] = verdict
    return found
