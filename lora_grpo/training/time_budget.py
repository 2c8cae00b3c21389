"""`--hours`: end training in time for the final evaluation.

Steps are the same as in a run without `--hours`; only their number depends on the clock, which is `Run.seconds_worked`.
All ranks read the clock of rank 0, so that they make the same decisions.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator

from lora_grpo import distributed
from lora_grpo.errors import RunError
from lora_grpo.runs import Run, duration

_MARGIN, _RESERVE = 1.2, 5.0
"""Safety factor for the time of the final evaluation, and seconds for the checkpoint and the report."""
_WINDOW = 10
"""Number of recent rounds used to estimate the time of the next one."""


class TimeBudget:
    """The time budget of a run. Without `--hours` it is infinite, and the methods have no effect.

    A round consists of the steps that use the same rollouts: one step, unless `num_iterations` is set.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seconds = 3600 * run.config.hours if run.config.hours else math.inf
        self.expected_steps: int | None = None
        """Estimate of the run's last step; None before this process has done one."""
        self._rounds: list[float] = []
        """Seconds of the rounds of this process, without validation passes."""
        self._validation = self._longest_validation = self._round_began = 0.0
        """Seconds of the validation passes of this round, of the longest pass, and the clock when the round began."""

    def check_evaluation(self) -> None:
        """Raise a RunError if too little time is left for the evaluation of the trained model."""
        run, seconds = self.run, self._final_evaluation()
        if self._now() + seconds <= self.seconds or run.is_trained:
            return
        # A run that starts again can train for a while: four times the evaluation, and a minute more.
        enough = run.seconds_worked + run.seconds_open + 4 * seconds + 60
        raise RunError(
            f"--hours {run.config.hours:g} is too little: {duration(self._now())} are used, and the final evaluation "
            f"takes {duration(seconds)}; pass --resume --hours {math.ceil(100 * enough / 3600) / 100:g}, or start over "
            "with a smaller --data.eval-limit"
        )

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Measure the validation pass in the block."""
        began = self._now()
        yield
        seconds = self._now() - began
        self._validation += seconds
        self._longest_validation = max(self._longest_validation, seconds)

    def begin_training(self) -> None:
        """Start the clock of the first round."""
        self._round_began, self._validation = self._now(), 0.0

    def is_last(self, step: int, uses: int, *, validates: bool) -> bool:
        """Measure a round, and return whether training must end with it. Call it before a validation pass.

        Args:
            step: the step that is done.
            uses: number of steps of a round.
            validates: whether a validation pass is due after this step.
        """
        run, now, max_steps = self.run, self._now(), self.run.config.train.max_steps
        if self.seconds == math.inf:
            return False
        self._rounds.append(now - self._round_began - self._validation)
        self._round_began, self._validation = now, 0.0
        # The first round of a process is slower, because it warms up.
        pace = statistics.fmean((self._rounds[1:] or self._rounds)[-_WINDOW:])
        # The last step has a validation pass of its own, besides one that is due now.
        passes = (1 + validates) * self._longest_validation
        left = self.seconds - now - passes - self._final_evaluation() - _RESERVE
        self.expected_steps = min(step + max(0, int(left / pace)) * uses, max_steps)
        is_last = left < pace and step < max_steps
        if is_last:
            run.record["out_of_time"] = {"step": step, "hours": run.config.hours}
        run.update()  # a killed run has worked at least until here
        return is_last

    def _final_evaluation(self) -> float:
        """Return the estimated time of the final evaluation: that of the base, with a margin.

        If rounds get slower, because completions get longer, so does the evaluation.
        """
        base = self.run.record.get("evaluation_seconds", {}).get("base", 0.0)
        size = min(_WINDOW, len(self._rounds) // 2)
        slower = statistics.median(self._rounds[-size:]) / statistics.median(self._rounds[:size]) if size > 2 else 1.0
        return distributed.broadcast_from_main(lambda: _MARGIN * base * min(3.0, max(1.0, slower)))

    def _now(self) -> float:
        return distributed.broadcast_from_main(lambda: self.run.seconds_worked)
