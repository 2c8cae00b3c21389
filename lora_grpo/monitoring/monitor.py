"""After each step of a run: metrics, alarms, validation passes, the best adapter, early stopping."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lora_grpo import console
from lora_grpo.errors import RunError
from lora_grpo.models import Policy, save_adapter
from lora_grpo.monitoring.alarms import Alarm, Alarms
from lora_grpo.monitoring.completion_log import passed_by_id
from lora_grpo.monitoring.phase_peaks import excess
from lora_grpo.monitoring.step_metrics import StepMetrics
from lora_grpo.monitoring.time_budget import TimeBudget
from lora_grpo.monitoring.validation import Validation
from lora_grpo.progress import Progress
from lora_grpo.runs import Run, read_metrics

CHECKPOINT_SECONDS = 600.0
"""Time after which a checkpoint is saved even if fewer than `train.checkpoint_steps` have passed."""


@dataclass(frozen=True)
class NextStep:
    """What follows a step."""

    saves: bool
    """Whether a checkpoint is saved now."""
    stops: bool
    """Whether training ends now."""


class Monitor:
    """Checks every step of a run.

    Alarms and the best step are written to run.json, the best adapter to `best/`.

    Args:
        step_metrics: metrics of the current step, to which a validation pass adds.
        validation: None without validation rows.
        is_stopped: whether a signal ends the run.
        steps_per_rollout: number of steps that use the same rollouts.
    """

    def __init__(
        self,
        run: Run,
        policy: Policy,
        step_metrics: StepMetrics,
        alarms: Alarms,
        validation: Validation | None,
        budget: TimeBudget,
        progress: Progress,
        is_stopped: Callable[[], bool],
        steps_per_rollout: int = 1,
    ) -> None:
        self.run = run
        self.policy = policy
        self.step_metrics = step_metrics
        self.alarms = alarms
        self.validation = validation
        self.budget = budget
        self.progress = progress
        self.is_stopped = is_stopped
        self.steps_per_rollout = steps_per_rollout
        self._best: dict[str, Any] = {}
        """`step`, `reward` and `accuracy` of the best validation pass."""
        self._last: dict[str, Any] = {}
        """The same of the last pass. Without `reward` if no row could be graded, also without `accuracy` if every agent
        failed."""
        self._passes_since_best = 0
        self._is_best_unsaved = False
        self._has_reported_ungraded = False
        self._checkpoint_time = 0.0
        """`Run.seconds_worked` at the last checkpoint."""
        self._phases_over_plan: set[str] = set()

    def begin(self, step: int, trainer_state: Any) -> None:
        """Validate the base of a new run, or restore the state of a resumed one without repeating its alarms.

        Args:
            step: the step of the checkpoint that the run resumes from, or 0.
            trainer_state: given to rewards, as TRL gives it.
        """
        import torch

        self.restore(step)
        has_passes = self.run.config.train.max_steps >= self.run.config.monitor.every_steps
        if step == 0 and self.validation and has_passes:
            with self.budget.validating():
                lines = self.validation.sample(0, trainer_state)
            self._raise(self._record_pass(0, lines))
        if self.run.record["policy"]["engine"] == "unsloth" and torch.cuda.is_available():
            console.note("the first step compiles Unsloth's kernels and can take minutes")
        self.budget.begin_training()

    def restore(self, step: int) -> None:
        """Replay the metrics and validation passes until a step, which are in the run folder, and save the best adapter
        if it is missing.

        Args:
            step: the step of the checkpoint that the policy is loaded from, or 0.
        """
        metrics = self.run.once(lambda: read_metrics(self.run.folder))
        passes: dict[int, list[dict[str, Any]]] = {}
        if self.validation:
            passes = self.run.once(self.validation.read_passes)
        if step and 0 in passes:
            self._record_pass(0, passes[0])
        for line in metrics:
            earlier_step = line["step"]
            self.alarms.step(earlier_step, line)
            if earlier_step in passes:
                self._record_pass(earlier_step, passes[earlier_step])
        # The run may have been killed after it saved the checkpoint of the best step but before it saved `best/`.
        self._is_best_unsaved = step > 0 and self._best.get("step") == step
        self.save_best()

    def record_step(self, step: int, logs: dict[str, Any]) -> None:
        """Write a step's metrics and check them. A RunError stops the run.

        Args:
            logs: metrics of the step, to which the time of the loss and the optimizer is added.
        """
        if "step_time" in logs:
            sampling_seconds = logs.get("time/rollouts", 0.0)
            reward_seconds = logs.get("time/rewards", 0.0)
            logs["time/training"] = logs["step_time"] - sampling_seconds - reward_seconds
        self.run.append_metrics({"step": step, **logs})
        self.progress.step(step, logs)
        for phase, warning in excess(self.run.config, self.run.record.get("memory", {}), logs).items():
            if phase not in self._phases_over_plan:
                console.note(warning)
            self._phases_over_plan.add(phase)
        # Times differ between processes, and alarms must not.
        shared_logs = self.run.once(lambda: logs)
        self._raise(self.alarms.step(step, shared_logs))

    def end_step(self, step: int, trainer_state: Any) -> NextStep:
        """Run a validation pass if one is due, and return what follows.

        A new best step is saved as a checkpoint and then as `best/`.
        """
        if step % self.steps_per_rollout:
            return NextStep(saves=False, stops=False)  # a run cannot be resumed between two uses of the same rollouts
        # A pass is due if one of the steps with these rollouts is a multiple of `every_steps`.
        every_steps = self.run.config.monitor.every_steps
        previous_step = step - self.steps_per_rollout
        includes_multiple = step // every_steps > previous_step // every_steps
        is_due = self.validation is not None and includes_multiple
        is_out_of_time = self.budget.is_last(step, self.steps_per_rollout, validates=is_due)
        if self.run.config.hours:
            self.progress.total = self.budget.expected_steps

        saves = self.run.once(self._is_checkpoint_overdue)
        stops_early = False
        if self.validation and (is_due or is_out_of_time):
            self._validate(self.validation, step, trainer_state)
            is_new_best = self._best.get("step") == step
            if is_new_best:
                self._is_best_unsaved = True
                saves = True
            else:
                stops_early = self._stops_early(step)
        stops = self.is_stopped() or is_out_of_time or stops_early
        return NextStep(saves=saves or stops, stops=stops)

    def _is_checkpoint_overdue(self) -> bool:
        """Return whether too much time would be lost if the run were killed now. Processes may disagree."""
        return self.run.seconds_worked - self._checkpoint_time > CHECKPOINT_SECONDS

    def save_best(self) -> None:
        """Save the adapter if it is the best so far and not yet saved. Called when a checkpoint is complete.

        In any case, run.json gets the time that the run has worked.
        """
        if self._is_best_unsaved:
            self.run.once(lambda: save_adapter(self.policy.model, self.policy.tokenizer, self.run.best))
            self.run.record["best"] = self._best
            self._is_best_unsaved = False
        self._checkpoint_time = self.run.seconds_worked
        self.run.update()  # a killed run has worked at least until here

    def _validate(self, validation: Validation, step: int, trainer_state: Any) -> None:
        """Run a validation pass, and add its means to the metrics of the step."""
        with self.budget.validating(), self.step_metrics.peaks.phase("validation"):
            lines = validation.sample(step, trainer_state)
        self._raise(self._record_pass(step, lines))
        for name in ("reward", "accuracy"):
            if name in self._last:
                self.step_metrics.add(f"validation/{name}", self._last[name])
        num_ungraded = sum(line["reward"] is None for line in lines)
        if num_ungraded:
            self.step_metrics.add("validation/ungraded_ratio", num_ungraded / len(lines))

    def _stops_early(self, step: int) -> bool:
        """Return whether too many passes were not the best, and record it."""
        patience = self.run.config.monitor.early_stopping
        if not patience or self._passes_since_best < patience:
            return False
        self.run.update(stopped_early={"step": step, "passes": self._passes_since_best})
        console.note(f"stopped early: no higher reward in {self._passes_since_best} validation passes")
        return True

    def _record_pass(self, step: int, lines: Sequence[dict[str, Any]]) -> list[Alarm]:
        """Update the alarms and the best step with a validation pass.

        Args:
            lines: those of `completion_lines`, one for each validation row.
        """
        rewards = [line["reward"] for line in lines if line["reward"] is not None]
        passed = passed_by_id(lines)
        if len(rewards) < len(lines) and not self._has_reported_ungraded:
            self._has_reported_ungraded = True
            console.note(
                f"warning: every reward returned None, or the agent failed, for {len(lines) - len(rewards)} of "
                f"{len(lines)} validation rows, which the validation reward leaves out"
            )
        if not rewards:  # the pass neither is the best nor counts as one that is not
            self._last = {"step": step}
            if passed:
                self._last["accuracy"] = statistics.fmean(passed.values())
            return []

        reward = statistics.fmean(rewards)
        self._last = {"step": step, "reward": reward, "accuracy": statistics.fmean(passed.values())}
        alarms = self.alarms.validation(step, rewards, passed)
        is_first = not self._best
        if is_first or (reward > self._best["reward"] and not self.alarms.hacked):
            self._best = self._last
            self._passes_since_best = 0
        else:
            self._passes_since_best += 1
        return alarms

    def _raise(self, alarms: Sequence[Alarm]) -> None:
        """Record and print alarms, and stop the run if one of them is in `--monitor.stop-on`."""
        stop_on = self.run.config.monitor.stop_on
        for alarm in alarms:
            stops = alarm.name in stop_on
            earlier_alarms = self.run.record.get("alarms", [])
            self.run.update(alarms=[*earlier_alarms, {**asdict(alarm), "stopped": stops}])
            if stops:
                other_names = [name for name in stop_on if name != alarm.name]
                raise RunError(
                    f"step {alarm.step}: {alarm.message} (the alarm {alarm.name} stops the run; to continue anyway: "
                    f"--resume {' '.join(['--monitor.stop-on', *other_names])})"
                )
            console.note(f"alarm, step {alarm.step}: {alarm.name}: {alarm.message}")
