"""Where the time of a step goes: rollouts, rewards, training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class StepPhases:
    """Mixed in before a GRPOTrainer: adds `time/rollouts` and `time/rewards` to a step's metrics, in seconds, and
    `rollouts/tokens_per_second`, of this process's completions.
    """

    on_phase: Callable[[str], None] | None = None
    """Is told when a phase begins."""

    def _generate(self, prompts: list[Any]) -> Any:
        self._begin("rollouts")
        started = time.perf_counter()
        found = super()._generate(prompts)  # type: ignore[misc]
        seconds = time.perf_counter() - started
        self._note("time/rollouts", seconds)
        self._note("rollouts/tokens_per_second", sum(map(len, found[1])) / seconds)
        return found

    def _calculate_rewards(self, *args: Any) -> Any:
        self._begin("rewards")
        started = time.perf_counter()
        found = super()._calculate_rewards(*args)  # type: ignore[misc]
        self._note("time/rewards", time.perf_counter() - started)
        self._begin("training")
        return found

    def _begin(self, phase: str) -> None:
        if self.on_phase:
            self.on_phase(phase)

    def _note(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)  # type: ignore[attr-defined]


def add_training_time(logs: dict[str, Any]) -> None:
    """Add `time/training`: what is left of a step's time."""
    if "step_time" in logs:
        logs["time/training"] = logs["step_time"] - logs.get("time/rollouts", 0.0) - logs.get("time/rewards", 0.0)
