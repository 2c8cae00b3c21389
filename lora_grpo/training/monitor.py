"""Monitor a training run: metrics, alarms, validation passes, the best adapter, early stopping."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.errors import RunError
from lora_grpo.models import save_adapter
from lora_grpo.runs import Run, read_metrics
from lora_grpo.training.alarms import Alarm, Alarms
from lora_grpo.training.completions import Validation
from lora_grpo.training.time_budget import TimeBudget
from lora_grpo.training.trl_compat import step_values


class Monitor:
    """Mixin that checks every step of a run. List it before transformers' TrainerCallback in the bases.

    Alarms and the best step are written to run.json, the best adapter to `best/`.
    """

    def __init__(
        self,
        run: Run,
        trainer: Any,
        alarms: Alarms,
        validation: Validation | None,
        budget: TimeBudget,
    ) -> None:
        self.run, self.trainer, self.alarms, self.validation, self.budget = run, trainer, alarms, validation, budget
        self.settings = run.config.monitor
        self._best: dict[str, Any] = {}
        """`step`, `reward` and `accuracy` of the best validation pass; `_last` of the last one."""
        self._last: dict[str, Any] = {}
        """Without `reward` if no row of the pass could be graded."""
        self._passes_since_best = 0
        self._unsaved = self._has_reported_ungraded = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state of a resumed run without repeating its alarms, or validate the base of a new run."""
        import torch

        step = state.global_step
        passes = self.validation.earlier() if self.validation else {}
        if step and 0 in passes:
            self._update(0, passes[0])
        earlier = distributed.broadcast_from_main(lambda: read_metrics(self.run.folder))
        for metrics in earlier:
            number = metrics["step"]
            self.alarms.step(number, metrics)
            if number in passes:
                self._update(number, passes[number])
        if not step and self.validation and self.run.config.train.max_steps >= self.settings.every_steps:
            with self.budget.validating():
                lines = self.validation.sample(0, state)
            self._raise(self._update(0, lines))
        if self.run.record["policy"]["engine"] == "unsloth" and torch.cuda.is_available():
            console.note("the first step compiles Unsloth's kernels and can take minutes")
        self.budget.begin_training()
        # The run may have been killed after it saved the checkpoint of the best step but before it saved `best/`.
        self._unsaved = step > 0 and self._best.get("step") == step
        self.on_save(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a step's metrics and check them. A RunError stops the run."""
        if not logs or "loss" not in logs:
            return
        if "step_time" in logs:
            logs["time/training"] = logs["step_time"] - logs.get("time/rollouts", 0.0) - logs.get("time/rewards", 0.0)
        self.run.append_metrics({"step": state.global_step, **logs})
        self.trainer.progress.step(state.global_step, logs)
        self._raise(self.alarms.step(state.global_step, distributed.broadcast_from_main(lambda: logs)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run a validation pass if one is due. A new best step is saved as a checkpoint and then as `best/`."""
        step, uses = state.global_step, self.trainer.num_iterations
        if step % uses:
            return  # a run cannot be resumed between two uses of the same rollouts
        every = self.settings.every_steps
        is_due = self.validation is not None and step // every > (step - uses) // every
        is_last = self.budget.is_last(step, uses, validates=is_due)
        if self.run.config.hours:
            self.trainer.progress.total = self.budget.expected_steps
        if self.validation and (is_due or is_last):
            self._validate(self.validation, state, control)
        if self.trainer.stop.signal_number() or is_last:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the adapter if it is the best so far and not yet saved. Called when a checkpoint is complete."""
        if self._unsaved:
            if distributed.is_main():
                save_adapter(self.trainer.model, self.trainer.processing_class, self.run.best)
            self.run.record["best"] = self._best
            self._unsaved = False
        self.run.update()  # a killed run has worked at least until here

    def _validate(self, validation: Validation, state: Any, control: Any) -> None:
        step = state.global_step
        with self.budget.validating():
            lines = validation.sample(step, state)
        self._raise(self._update(step, lines))
        metrics = step_values(self.trainer)
        for name in ("reward", "accuracy"):
            if name in self._last:
                metrics[f"validation/{name}"].append(self._last[name])
        if ungraded := sum(line["reward"] is None for line in lines):
            metrics["validation/ungraded_ratio"].append(ungraded / len(lines))
        if self._best.get("step") == step:
            self._unsaved = control.should_save = True
        elif self.settings.early_stopping and self._passes_since_best >= self.settings.early_stopping:
            self.run.update(stopped_early={"step": step, "passes": self._passes_since_best})
            control.should_save = control.should_training_stop = True
            console.note(f"stopped early: no higher reward in {self._passes_since_best} validation passes")

    def _update(self, step: int, lines: Sequence[dict[str, Any]]) -> list[Alarm]:
        """Update the alarms and the best step with a validation pass."""
        rewards = [line["reward"] for line in lines if line["reward"] is not None]
        passed = {line["id"]: line["passed"] for line in lines}
        accuracy = statistics.fmean(passed.values())
        if len(rewards) < len(lines) and not self._has_reported_ungraded:
            self._has_reported_ungraded = True
            console.note(
                f"warning: every reward returned None for {len(lines) - len(rewards)} of {len(lines)} validation rows, "
                "which the validation reward leaves out"
            )
        if not rewards:  # the pass neither is the best nor counts as one that is not
            self._last = {"step": step, "accuracy": accuracy}
            return []
        means = {"reward": statistics.fmean(rewards), "accuracy": accuracy}
        alarms, self._last = self.alarms.validation(step, rewards, passed), {"step": step, **means}
        if not self._best or (means["reward"] > self._best["reward"] and not self.alarms.hacked):
            self._best, self._passes_since_best = self._last, 0
        else:
            self._passes_since_best += 1
        return alarms

    def _raise(self, alarms: Sequence[Alarm]) -> None:
        """Record and print alarms, and stop the run if one of them is in `--monitor.stop-on`."""
        for alarm in alarms:
            stops = alarm.name in self.settings.stop_on
            self.run.update(alarms=[*self.run.record.get("alarms", []), {**asdict(alarm), "stopped": stops}])
            if stops:
                others = [name for name in self.settings.stop_on if name != alarm.name]
                raise RunError(
                    f"step {alarm.step}: {alarm.message} (the alarm {alarm.name} stops the run; to continue anyway: "
                    f"--resume {' '.join(['--monitor.stop-on', *others])})"
                )
            console.note(f"alarm, step {alarm.step}: {alarm.name}: {alarm.message}")
