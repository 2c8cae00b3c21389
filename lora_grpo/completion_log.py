"""The completions of every n-th step with their verdicts and all their rewards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import atomic, json_lines, ranks
from lora_grpo.completion_lines import completion_lines
from lora_grpo.rewards import RewardFunction, completion_text
from lora_grpo.tasks import Row


class CompletionLog:
    """Looks over the trainer's shoulder as it calls the reward functions.

    Args:
        folder: gets `step-00010.jsonl`, one line a completion; of several processes the first one's completions.
        every: steps between two files.
        weights: scale of each reward, by name.
        eos_token_ids: the tokens that end a completion.
    """

    def __init__(self, folder: Path, every: int, weights: dict[str, float], eos_token_ids: Sequence[int]) -> None:
        self.folder, self.every, self.weights, self.eos_token_ids = folder, every, weights, eos_token_ids
        self._step = 1
        self._rewards: dict[str, list[float | None]] = {}
        self._batch: tuple[list[Row], list[str], list[list[int]]] = ([], [], [])

    def resumed_at(self, step: int) -> None:
        """Say that the next step is the one after `step`."""
        self._step = step + 1

    def watch(self, reward: RewardFunction) -> RewardFunction:
        """Return the reward function, noting what it is given and what it returns in the steps that are written."""
        name = reward.__name__

        @functools.wraps(reward)
        def watched(completions: list[Any], **columns: Any) -> list[float | None]:
            values = reward(completions=completions, **columns)
            if ranks.is_main() and (self._step == 1 or self._step % self.every == 0):
                self._note(name, completions, values, columns)
            return values

        return watched

    def write(self, step: int) -> None:
        """Write what was noted during `step`, and get ready for the next one."""
        if self._rewards:
            rows, texts, token_ids = self._batch
            values = zip(*self._rewards.values(), strict=True)
            rewards = [dict(zip(self._rewards, each, strict=True)) for each in values]
            lines = completion_lines(rows, texts, token_ids, rewards, self.weights, self.eos_token_ids)
            text = json_lines.dump([{"step": step, **line} for line in lines])
            atomic.write_text(self.folder / f"step-{step:05d}.jsonl", text)
        self._rewards, self._step = {}, step + 1

    def _note(self, name: str, completions: list[Any], values: list[float | None], columns: dict[str, Any]) -> None:
        if not self._rewards or name in self._rewards:  # a new batch
            per_row = {column: entries for column, entries in columns.items() if isinstance(entries, list)}
            rows = [{column: per_row[column][place] for column in per_row} for place in range(len(completions))]
            self._batch = (rows, [completion_text(each) for each in completions], columns["completion_ids"])
            self._rewards = {}
        self._rewards[name] = list(values)
