"""Log the completions of every n-th step with their verdicts and rewards."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.files import atomic, json_files
from lora_grpo.rewards import RewardFunction, completion_text
from lora_grpo.tasks import Row, grade_all


@dataclass
class CompletionLog:
    """Records completions as the trainer calls the reward functions."""

    folder: Path
    """Where files such as `step-00010.jsonl` are written, with one line per completion of rank 0."""
    every: int
    """In steps."""
    weights: dict[str, float]
    """By reward name."""
    eos_token_ids: Sequence[int]
    _values: dict[str, list[float | None]] = field(default_factory=dict)
    """Values of the rewards that were called in this step."""

    def wrap(self, reward: RewardFunction) -> RewardFunction:
        """Return a reward function that also logs its values in the steps to be logged."""

        @functools.wraps(reward)
        def recorded(completions: list[Any], **columns: Any) -> list[float | None]:
            values = reward(completions=completions, **columns)
            step = columns["trainer_state"].global_step + 1
            if distributed.is_main() and (step == 1 or step % self.every == 0):
                self._values[reward.__name__] = values
                if len(self._values) == len(self.weights):
                    self._write(step, completions, columns)
            return values

        return recorded

    def _write(self, step: int, completions: list[Any], columns: Mapping[str, Any]) -> None:
        per_row = {name: entries for name, entries in columns.items() if isinstance(entries, list)}
        rows = [dict(zip(per_row, entries, strict=True)) for entries in zip(*per_row.values(), strict=True)]
        rewards = [dict(zip(self._values, each, strict=True)) for each in zip(*self._values.values(), strict=True)]
        self._values = {}
        texts = [completion_text(each) for each in completions]
        ids = columns["completion_ids"]
        write_completions(
            self.folder, step, completion_lines(rows, texts, ids, rewards, self.weights, self.eos_token_ids)
        )


def write_completions(folder: Path, step: int, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines of one step."""
    text = json_files.dump_lines({"step": step, **line} for line in lines)
    atomic.write_text(folder / f"step-{step:05d}.jsonl", text)


def completion_lines(
    rows: Sequence[Row],
    completions: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    rewards: Sequence[Mapping[str, float | None]],
    weights: Mapping[str, float],
    eos_token_ids: Sequence[int],
) -> list[dict[str, Any]]:
    """Grade completions of one task and return one line for each.

    `reward` is the weighted sum of the rewards that can grade the row.
    """
    verdicts = grade_all(rows[0]["task"], completions, rows)
    return [
        {
            "id": row["id"],
            "question": row["question"],
            "answer": row.get("answer"),
            "completion": completion,
            "extracted": verdict.extracted,
            "passed": verdict.passed,
            "status": "passed" if verdict.passed else verdict.reason,
            "num_tokens": len(ids),
            "truncated": not ids or ids[-1] not in eos_token_ids,
            "rewards": dict(earned),
            "reward": sum(weights[name] * (value or 0.0) for name, value in earned.items()),
        }
        for row, completion, ids, earned, verdict in zip(rows, completions, token_ids, rewards, verdicts, strict=True)
    ]
