"""Log the completions of every n-th step with their verdicts and rewards."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.files import atomic, json_files
from lora_grpo.rewards import RewardFunction, completion_text
from lora_grpo.tasks import UNGRADED_TASKS, Row, Verdict, grade_all


class CompletionLog:
    """Records completions as the trainer calls the reward functions.

    Args:
        folder: where files such as `step-00010.jsonl` are written, with one line per completion of rank 0.
        every: number of steps between two files.
        weights: weight of each reward, by name.
        eos_token_ids: tokens that end a completion.
    """

    def __init__(self, folder: Path, every: int, weights: dict[str, float], eos_token_ids: Sequence[int]) -> None:
        self.folder, self.every, self.weights, self.eos_token_ids = folder, every, weights, eos_token_ids
        self._step = 1
        self._rewards: dict[str, list[float | None]] = {}
        self._batch: tuple[list[Row], list[str], list[list[int]]] = ([], [], [])

    def resume_after(self, step: int) -> None:
        """Continue with the step after `step`."""
        self._step = step + 1

    def wrap(self, reward: RewardFunction) -> RewardFunction:
        """Return a reward function that also records its arguments and values in the steps to be logged."""
        name = reward.__name__

        @functools.wraps(reward)
        def recorded(completions: list[Any], **columns: Any) -> list[float | None]:
            values = reward(completions=completions, **columns)
            if distributed.is_main() and (self._step == 1 or self._step % self.every == 0):
                self._record(name, completions, values, columns)
            return values

        return recorded

    def write(self, step: int) -> None:
        """Write the completions recorded during `step`."""
        if self._rewards:
            rows, texts, token_ids = self._batch
            values = zip(*self._rewards.values(), strict=True)
            rewards = [dict(zip(self._rewards, each, strict=True)) for each in values]
            lines = completion_lines(rows, texts, token_ids, rewards, self.weights, self.eos_token_ids)
            text = json_files.dump_lines([{"step": step, **line} for line in lines])
            atomic.write_text(self.folder / f"step-{step:05d}.jsonl", text)
        self._rewards, self._step = {}, step + 1

    def _record(self, name: str, completions: list[Any], values: list[float | None], columns: dict[str, Any]) -> None:
        if not self._rewards or name in self._rewards:  # a new batch
            per_row = {column: entries for column, entries in columns.items() if isinstance(entries, list)}
            rows = [{column: per_row[column][index] for column in per_row} for index in range(len(completions))]
            self._batch = (rows, [completion_text(each) for each in completions], columns["completion_ids"])
            self._rewards = {}
        self._rewards[name] = list(values)


def completion_lines(
    rows: Sequence[Row],
    completions: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    rewards: Sequence[Mapping[str, float | None]],
    weights: Mapping[str, float],
    eos_token_ids: Sequence[int],
) -> list[dict[str, Any]]:
    """Grade completions and return one line for each.

    Args:
        rows: B rows of one task, one per completion.
        completions: B texts.
        token_ids: B lists of token ids, including the end-of-sequence token.
        rewards: B mappings of reward name to unweighted value; None if the reward cannot grade the row.
        weights: weight of each reward, by name.
        eos_token_ids: tokens that end a completion.

    Returns:
        B lines. `reward` is the weighted sum. `passed`, `status` and `extracted` come from the grader and are None if
        the row has no answer.
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
                "status": verdict and ("passed" if verdict.passed else verdict.reason),
                "num_tokens": len(ids),
                "truncated": not ids or ids[-1] not in eos_token_ids,
                "rewards": dict(earned),
                "reward": sum(weights[name] * (value or 0.0) for name, value in earned.items()),
            }
        )
    return lines


def _verdicts(rows: Sequence[Row], completions: Sequence[str]) -> list[Verdict | None]:
    gradable = [n for n, row in enumerate(rows) if row["task"] not in UNGRADED_TASKS and row.get("answer") is not None]
    verdicts: list[Verdict | None] = [None] * len(rows)
    if gradable:
        graded = [rows[n] for n in gradable]
        for n, verdict in zip(
            gradable, grade_all(graded[0]["task"], [completions[n] for n in gradable], graded), strict=True
        ):
            verdicts[n] = verdict
    return verdicts
