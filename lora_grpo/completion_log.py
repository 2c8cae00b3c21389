"""A few completions with every reward they got, written every n steps."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from lora_grpo import atomic, ranks
from lora_grpo.rewards import RewardFunction, completion_text

_SHOWN = 16


class CompletionLog:
    """Looks over the trainer's shoulder as it calls the reward functions.

    Args:
        folder: gets `step-00010.jsonl`, one line a completion.
        every: steps between two files.
        weights: scale of each reward, by name.
    """

    def __init__(self, folder: Path, every: int, weights: dict[str, float]) -> None:
        self.folder, self.every, self.weights = folder, every, weights
        self._step = 1
        self._lines: list[dict[str, Any]] = []

    def resumed_at(self, step: int) -> None:
        """Say that the next step is the one after `step`."""
        self._step = step + 1

    def watch(self, reward: RewardFunction) -> RewardFunction:
        """Return the reward function, noting what it is given and what it returns in the steps that are written."""
        name = reward.__name__

        @functools.wraps(reward)
        def watched(completions: list[Any], **columns: Any) -> list[float | None]:
            values = reward(completions=completions, **columns)
            if self._step == 1 or self._step % self.every == 0:
                self._note(name, completions, values, columns)
            return values

        return watched

    def write(self, step: int) -> None:
        """Write what was noted during `step`, and get ready for the next one."""
        if self._lines and ranks.is_main():
            for line in self._lines:
                scores = line["rewards"]
                line["reward"] = sum(self.weights[name] * (value or 0.0) for name, value in scores.items())
            text = "".join(json.dumps({"step": step, **line}, ensure_ascii=False) + "\n" for line in self._lines)
            atomic.write_text(self.folder / f"step-{step:05d}.jsonl", text)
        self._lines, self._step = [], step + 1

    def _note(self, name: str, completions: list[Any], values: list[float | None], columns: dict[str, Any]) -> None:
        if not self._lines or name in self._lines[0]["rewards"]:  # a new batch
            self._lines = [
                {
                    "id": columns["id"][place],
                    "question": columns["question"][place],
                    "completion": completion_text(completions[place]),
                    "rewards": {},
                }
                for place in range(min(_SHOWN, len(completions)))
            ]
        for line, value in zip(self._lines, values, strict=False):
            line["rewards"][name] = value
