"""`--hours`: end training in time for the final evaluation.

Steps are the same as in a run without `--hours`; only their number depends on the clock, which is `Run.seconds_worked`.
Of several processes, one reads it for all.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from lora_grpo.errors import RunError
from lora_grpo.progress import duration
from lora_grpo.runs import Run

_MARGIN = 1.2
"""Safety factor for the time of the final evaluation."""
_RESERVE = 5.0
"""Seconds for the checkpoint and the report."""
_WINDOW = 10
"""Number of recent rounds used to estimate the time of the next one."""
_MAX_SLOWDOWN = 3.0
"""Largest factor by which the final evaluation is expected to be slower than that of the base."""


@dataclass(frozen=True)
class _Forecast:
    """What the clock says at the end of a round."""

    is_last_round: bool
    """Whether too little time is left for another round."""
    expected_steps: int
    """Estimate of the run's last step."""


class TimeBudget:
    """The time budget of a run. Without `--hours` it is infinite, and the methods have no effect.

    A round consists of the steps that use the same rollouts: one step, unless `num_iterations` is set.
    """

    expected_steps: int | None = None
    """Estimate of the run's last step; None before this process has done one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seconds = 3600 * run.config.hours if run.config.hours else math.inf
        self._rounds: list[float] = []
        """Seconds of the rounds of this process, without validation passes."""
        self._round_began = 0.0
        """The clock when the round began."""
        self._validation = 0.0
        """Seconds of the validation passes of this round."""
        self._longest_validation = 0.0
        """Seconds of the longest pass."""

    def check_evaluation(self) -> None:
        """Raise a RunError if too little time is left for the evaluation of the trained model."""
        run = self.run
        seconds_worked, seconds_needed = run.once(lambda: (run.seconds_worked, self._final_evaluation()))
        if seconds_worked + seconds_needed <= self.seconds or run.is_trained:
            return
        # Enough for a process that resumes the run: as long a start as this one's, four times the evaluation, and a
        # minute, so that it can also train for a while.
        enough_seconds = seconds_worked + run.seconds_open + 4 * seconds_needed + 60
        enough_hours = math.ceil(100 * enough_seconds / 3600) / 100
        raise RunError(
            f"--hours {run.config.hours:g} is too little: {duration(seconds_worked)} are used, and the final "
            f"evaluation takes {duration(seconds_needed)}; pass --resume --hours {enough_hours:g}, or start over "
            "with a smaller --data.eval-limit"
        )

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Measure the validation pass in the block."""
        began = self.run.seconds_worked
        yield
        seconds = self.run.seconds_worked - began
        self._validation += seconds
        self._longest_validation = max(self._longest_validation, seconds)

    def begin_training(self) -> None:
        """Start the clock of the first round."""
        self._begin_round(self.run.seconds_worked)

    def is_last(self, step: int, steps_per_round: int, *, validates: bool) -> bool:
        """Measure a round, and return whether training must end with it. Call it before a validation pass.

        Args:
            step: the step that is done.
            validates: whether a validation pass is due after this step.
        """
        if self.seconds == math.inf:
            return False
        forecast = self.run.once(lambda: self._end_round(step, steps_per_round, validates))
        self.expected_steps = forecast.expected_steps
        # After the last of `max_steps`, training ends anyway, and not for lack of time.
        is_out_of_time = forecast.is_last_round and step < self.run.config.train.max_steps
        if is_out_of_time:
            self.run.record["out_of_time"] = {"step": step, "hours": self.run.config.hours}
        self.run.update()  # a killed run has worked at least until here
        return is_out_of_time

    def _end_round(self, step: int, steps_per_round: int, validates: bool) -> _Forecast:
        """Measure a round, begin the next one, and return whether there is time for it."""
        now = self.run.seconds_worked
        max_steps = self.run.config.train.max_steps
        self._rounds.append(now - self._round_began - self._validation)
        self._begin_round(now)

        # The first round of a process is slower, because it warms up.
        warm_rounds = self._rounds[1:] or self._rounds
        seconds_per_round = statistics.fmean(warm_rounds[-_WINDOW:])

        # The last step has a validation pass of its own, besides one that is due now.
        passes = 2 if validates else 1
        seconds_left = self.seconds - now - passes * self._longest_validation - self._final_evaluation() - _RESERVE
        rounds_left = max(0, int(seconds_left / seconds_per_round))
        expected_steps = min(step + rounds_left * steps_per_round, max_steps)
        return _Forecast(seconds_left < seconds_per_round, expected_steps)

    def _begin_round(self, now: float) -> None:
        self._round_began = now
        self._validation = 0.0

    def _final_evaluation(self) -> float:
        """Return the estimated seconds of the final evaluation: those of the base, with a margin.

        If rounds get slower, because completions get longer, so does the evaluation.
        """
        base_seconds = self.run.record.get("evaluation_seconds", {}).get("base", 0.0)
        size = min(_WINDOW, len(self._rounds) // 2)
        slowdown = 1.0
        if size > 2:
            first_rounds = self._rounds[:size]
            last_rounds = self._rounds[-size:]
            slowdown = statistics.median(last_rounds) / statistics.median(first_rounds)
        return float(_MARGIN * base_seconds * min(_MAX_SLOWDOWN, max(1.0, slowdown)))
