"""`--hours`: measure the phases of a run, plan its time, and end training in time for the final evaluation.

Steps are the same as in a run without `--hours`; only their number depends on the clock, which is `Run.seconds_worked`.
All ranks read the clock of rank 0, so that they make the same decisions.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from lora_grpo import distributed
from lora_grpo.config import RunConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.evaluation import evaluate
from lora_grpo.runs import Run, duration, read_metrics, read_record
from lora_grpo.sampling import Sampler
from lora_grpo.tasks import Row, sample_rows

T = TypeVar("T")

_EVALUATION_SHARE = 0.4
"""If both evaluations take more than this share of the remaining time, rows are left out."""
_LEAST_ROWS = 50
"""Fewer rows are not worth an evaluation. As many measure its speed."""
_MEASURED_ROUNDS = 3
"""The plan is made after this many rounds. The first is a warm-up and does not count."""
_LEAST_STEPS, _USEFUL_STEPS = 5, 20
"""A run with time for fewer steps is refused; the error suggests time for more."""
_UNMEASURED_STEPS, _MARGIN = 60.0, 1.2
"""In the hours that an error suggests: least seconds for steps that are not measured, and room for a slower machine."""
_LEAST_PASSES = 4
"""Number of validation passes that a short run makes room for, besides that of the base."""
_WINDOW = 10
"""Number of recent rounds that predict the next one."""
_LEAST_RESERVE, _RESERVE_SHARE = 5.0, 0.01
"""Seconds, and share of all, that are kept for what cannot be measured in advance."""


class TimeBudget:
    """The time of a run. Without `--hours` it is endless, and every method does nothing.

    A round is the steps that use the same rollouts: one step, unless `num_iterations` is set.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        hours = run.config.hours
        self.seconds = hours * 3600 if hours else math.inf
        self.expected_steps: int | None = None
        """Estimate of the run's last step; None before this process has done one."""
        self._record: dict[str, Any] = dict(run.record.get("time_budget") or {})
        self._rounds: list[float] = []
        """Seconds of the rounds of this process, without validation passes."""
        self._sampling: list[float] = []
        """Seconds of the rollouts of each step of the run; in SFT, of the steps."""
        self._round_began = self._validated = self._base_evaluation = 0.0

    @property
    def is_endless(self) -> bool:
        return self.seconds == math.inf

    @property
    def every_steps(self) -> int:
        """Steps between validation passes."""
        return int(self._record.get("every_steps") or self.run.config.monitor.every_steps)

    def choose_rows(self, sampler: Sampler, rows: list[Row]) -> list[Row]:
        """Return the rows of both evaluations: all, or a seeded sample if all take too long.

        Their number is decided once, before the evaluation of the base, and depends only on the time that a few rows
        take, not on their results.
        """
        if self.is_endless:
            return rows
        self._save(startup=round(self._shared(self.run.seconds_open), 1))
        began = self._shared(any(self.run.evaluation.glob("base.samples.jsonl*")))
        if "eval_rows" not in self._record and not began and len(rows) > _LEAST_ROWS:
            number = self._rows_that_fit(sampler, rows)
            if number < len(rows):
                self._save(eval_rows=number)
        return sample_rows(rows, self._record.get("eval_rows"), self.run.config.seed)

    def _rows_that_fit(self, sampler: Sampler, rows: Sequence[Row]) -> int:
        """Return the number of rows that can be evaluated before and after training."""
        measured, files = sample_rows(rows, _LEAST_ROWS, self.run.config.seed), "speed.samples.jsonl*"
        for leftover in self.run.evaluation.glob(files) if distributed.is_main() else ():
            leftover.unlink()
        self.run.record.get("evaluation_seconds", {}).pop("speed", None)
        evaluate(self.run, sampler, measured, "speed")
        seconds = self._shared(self.run.record["evaluation_seconds"].pop("speed")) / len(measured)
        for done in self.run.evaluation.glob(files) if distributed.is_main() else ():
            done.unlink()
        left = self.seconds - self._now()
        number = int(_EVALUATION_SHARE * left / (2 * seconds))
        if number >= len(rows):
            return len(rows)
        if number < _LEAST_ROWS:
            self._base_evaluation = _LEAST_ROWS * seconds
            raise self._too_little(
                f"is too little: evaluating {_LEAST_ROWS} rows twice takes {duration(2 * self._base_evaluation)}",
                3 * self._base_evaluation + self._useful_steps(),  # their speed is measured again
                "; or pass a smaller --eval.num-samples and --eval.k with --overwrite",
            )
        print(
            f"evaluating a sample of {number} of {len(rows)} rows before and after training: with all rows, the two "
            f"evaluations would take {duration(2 * len(rows) * seconds)}, and at most {_EVALUATION_SHARE:.0%} of the "
            f"{duration(left)} left is for them",
            file=sys.stderr,
        )
        return number

    def base_is_evaluated(self) -> None:
        """Raise a RunError if the evaluation of the base has not left time for that of the trained model."""
        if self.is_endless:
            return
        self._base_evaluation = self._shared(self.run.record.get("evaluation_seconds", {}).get("base", 0.0))
        if self._now() + self._final_evaluation() > self.seconds and not self.run.is_trained:
            raise self._too_little(
                f"is too little: evaluating the base took {duration(self._base_evaluation)}, as the final evaluation "
                "will",
                self._base_evaluation + self._useful_steps(),
            )

    def check_resumed(self) -> None:
        """Raise a UserError if the run cannot go on in its hours, whatever it does next."""
        evaluation = self.run.record.get("evaluation_seconds", {}).get("base", 0.0)
        used = self.run.seconds_worked
        if self.is_endless or self.run.is_trained or used + evaluation < self.seconds:
            return
        self._base_evaluation = evaluation
        left = f", and the final evaluation takes {duration(evaluation)}" if evaluation else ""
        raise UserError(
            f"{round(used / 3600, 2):g} of {self.run.config.hours:g} h are used{left}; pass --resume --hours "
            f"{self._enough_hours(evaluation + self._useful_steps()):g}"
        )

    def begin_training(self, sampled: Sequence[dict[str, Any]]) -> None:
        """Start the clock of the first round. `sampled` are the metrics of earlier steps."""
        if self.is_endless:
            return
        self._round_began = self._now()
        self._sampling = []
        for metrics in sampled:
            self.add_metrics(metrics)
        if "used" in self._record:  # the run had ended and now has more hours
            used, kept = self._record["used"], ("eval_rows", "startup", "validation", "validation_pass")
            self._record = {name: self._record[name] for name in kept if name in self._record}
            # Whatever was not training or evaluation was time to start.
            earlier = used["training"] + used["validation"] + used["evaluation"]
            self._save(training_began=round(self._round_began - earlier, 1), evaluated=used["evaluation"])
        if "training_began" not in self._record:
            self._save(training_began=round(self._round_began, 1))
        elif sampled:
            print(f"{duration(max(0.0, self.seconds - self._round_began))} of --hours are left", file=sys.stderr)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Note how long the rollouts of a step took. The metrics are those of rank 0."""
        name = "step_time" if self.run.config.method == "sft" else "time/rollouts"
        if name in metrics:  # absent if the step reuses rollouts
            self._sampling.append(metrics[name])

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Measure the validation pass in the block."""
        if self.is_endless:
            yield
            return
        began = self._now()
        yield
        seconds = self._now() - began
        self._validated += seconds
        total = self._record.get("validation", 0.0) + seconds
        self._save(validation=round(total, 1), validation_pass=round(seconds, 3))

    def is_last(self, step: int, uses: int, *, validates: bool) -> bool:
        """Measure a round, and return whether training must end with it. Call it before a validation pass.

        Args:
            step: the step that is done.
            uses: number of steps of a round.
            validates: whether a validation pass is due after this step.

        Raises:
            RunError: there is time for only a few steps.
        """
        if self.is_endless:
            return False
        now, max_steps = self._now(), self.run.config.train.max_steps
        self._rounds.append(now - self._round_began - self._validated)
        self._round_began, self._validated = now, 0.0
        pace = statistics.fmean((self._rounds[1:] or self._rounds)[-_WINDOW:])
        one_pass = self._record.get("validation_pass", 0.0)
        # The last step has a validation pass of its own. The rest is for the checkpoint, the report and surprises.
        reserve = self._final_evaluation() + one_pass + max(_LEAST_RESERVE, _RESERVE_SHARE * self.seconds)
        room = self.seconds - now - reserve - validates * one_pass
        rounds = max(0, int(room / (pace + one_pass * uses / self.every_steps)))
        self.expected_steps = min(step + rounds * uses, max_steps)
        is_last = room < pace and step < max_steps
        if is_last or len(self._rounds) == _MEASURED_ROUNDS:
            if self.expected_steps < min(_LEAST_STEPS, max_steps):
                raise self._too_little(
                    f"leaves time for {self.expected_steps} steps of {pace / uses:.1f} s",
                    reserve + one_pass + _USEFUL_STEPS / uses * pace,  # these few steps have no checkpoint
                    f" for {_USEFUL_STEPS} steps",
                )
            if "planned" not in self._record:
                self._plan(now, step, pace / uses)
        if is_last:
            self.run.record["out_of_time"] = {"step": step, "hours": self.run.config.hours}
            self.expected_steps = step
        self._save()  # a killed run has worked at least until here
        return is_last

    def _plan(self, now: float, step: int, pace: float) -> None:
        """Record and print the plan."""
        steps, every, one_pass = self.expected_steps or step, self.every_steps, self._record.get("validation_pass", 0.0)
        if one_pass:
            every = min(every, max(1, steps // _LEAST_PASSES))
        done, evaluated = self._record.get("validation", 0.0), self._record.get("evaluated", 0.0)
        planned = {
            "start": self._record["training_began"],
            "training": now - self._record["training_began"] - evaluated - done + (steps - step) * pace,
            "validation": done + (steps - step) // every * one_pass,
            "evaluation": evaluated + self._final_evaluation(),
        }
        planned = {phase: round(seconds, 1) for phase, seconds in planned.items()}
        self._save(every_steps=every, planned={**planned, "steps": steps})
        passes = f"{duration(planned['validation'])} for validation after every {every} steps, " if one_pass else ""
        print(
            f"plan for {duration(self.seconds)}: {duration(planned['start'])} until the first step, "
            f"{duration(planned['training'])} for about {steps} steps of {pace:.1f} s, {passes}"
            f"{duration(planned['evaluation'])} for the final evaluation",
            file=sys.stderr,
        )

    def training_ended(self) -> None:
        """Note that training has ended."""
        if not self.is_endless:
            self._save(training_ended=round(self._now(), 1))

    def end(self) -> None:
        """Record what became of the plan, once. Call it after the final evaluation."""
        if self.is_endless or "used" in self._record:
            return
        now = self._now()
        began = self._record.get("training_began", now)
        ended, validation = self._record.get("training_ended", now), self._record.get("validation", 0.0)
        evaluated = self._record.get("evaluated", 0.0)
        training, evaluation = ended - began - validation - evaluated, now - ended + evaluated
        used = {"start": began, "training": training, "validation": validation, "evaluation": evaluation}
        used = {phase: round(seconds, 1) for phase, seconds in used.items()}
        lines = distributed.broadcast_from_main(lambda: read_metrics(self.run.folder)[-1:])
        self._save(used={**used, "steps": lines[0]["step"] if lines else 0})

    def _final_evaluation(self) -> float:
        """Return the estimated duration of the final evaluation.

        Sampling takes as long as in the evaluation of the base, times how much slower rollouts have become: completions
        get longer or shorter, and other programs use the machine.
        """
        size = min(_WINDOW, len(self._sampling) // 2)
        if size < 3:
            return self._base_evaluation
        now, before = statistics.median(self._sampling[-size:]), statistics.median(self._sampling[:size])
        return self._base_evaluation * min(3.0, max(0.5, now / before))

    def _useful_steps(self) -> float:
        """Return the seconds of some steps, before this process has done one.

        Without earlier steps of the run, they get the share of the time that the evaluations leave.
        """
        lines = read_metrics(self.run.folder)[-_WINDOW:]
        if earlier := [line["step_time"] for line in lines if "step_time" in line]:
            return _USEFUL_STEPS * statistics.median(earlier)
        return max(_UNMEASURED_STEPS, 2 * self._base_evaluation * (1 / _EVALUATION_SHARE - 1))

    def _too_little(self, problem: str, more: float, fix: str = "") -> RunError:
        """Return the error of a run that needs `more` seconds once it has started again."""
        return RunError(
            f"--hours {self.run.config.hours:g} {problem}; {duration(self._now())} are used, start-up included; pass "
            f"--resume --hours {self._enough_hours(more):g}{fix}"
        )

    def _enough_hours(self, more: float) -> float:
        """Return the hours of a run that starts again now and then needs `more` seconds."""
        needed = self._now() + _MARGIN * (self._record.get("startup", 0.0) + more)
        return math.ceil(100 * needed / 3600) / 100

    def _now(self) -> float:
        return self._shared(self.run.seconds_worked)

    def _shared(self, value: T) -> T:
        """Return the value of rank 0."""
        return distributed.broadcast_from_main(lambda: value)

    def _save(self, **entries: Any) -> None:
        self._record |= entries
        self.run.update(time_budget=self._record)


def check_time_left(config: RunConfig) -> None:
    """Raise a UserError if the hours of the run in the output folder are used up, before anything is loaded."""
    if distributed.is_main() and (config.folder / "run.json").is_file():
        TimeBudget(Run(config, read_record(config.folder))).check_resumed()
