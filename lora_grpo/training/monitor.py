"""Monitor a training run: alarms, validation passes, the best adapter, early stopping."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import RunError
from lora_grpo.models import save_adapter
from lora_grpo.runs import Run, read_metrics
from lora_grpo.training.alarms import Alarm, Alarms
from lora_grpo.training.validation import Validation


class Monitor:
    """Checks every step of a run.

    Args:
        run: the open run. Alarms and the best step are written to run.json, the best adapter to `best/`.
        alarms: state of the alarms.
        validation: samples the validation set. None if the run has no validation set.
    """

    def __init__(self, run: Run, alarms: Alarms, validation: Validation | None) -> None:
        self.run, self.alarms, self.validation = run, alarms, validation
        self.settings = run.config.monitor
        self._best: dict[str, Any] = {}
        """`step`, `reward` and, for graded tasks, `accuracy` of the best validation pass."""
        self._passes_since_best = 0
        self._unsaved = False

    def begin(self, trainer: Any) -> None:
        """Restore the state of a resumed run without repeating its alarms, or validate the base of a new run."""
        step = trainer.state.global_step
        passes = self.validation.earlier() if self.validation else {}
        if step and 0 in passes:
            self._update(0, passes[0])
        for metrics in distributed.broadcast_from_main(lambda: read_metrics(self.run.folder)):
            number = metrics["step"]
            self.alarms.step(number, metrics)
            if number in passes:
                self._update(number, passes[number])
        if not step and self.validation and self.run.config.train.max_steps >= self.settings.every_steps:
            self._raise(self._update(0, self.validation.sample(0, trainer.state)))
        # The run may have been killed after it saved the checkpoint of the best step but before it saved `best/`.
        self._unsaved = step > 0 and self._best.get("step") == step
        self.save_best(trainer)

    def after_step(self, trainer: Any, control: Any) -> None:
        """Run a validation pass if one is due. A new best step is saved as a checkpoint and then as `best/`."""
        step, uses = trainer.state.global_step, trainer.num_iterations
        # Never between two uses of the same rollouts, because a run cannot be resumed there.
        is_due = step % uses == 0 and step // self.settings.every_steps > (step - uses) // self.settings.every_steps
        if not self.validation or not is_due:
            return
        trainer.on_phase("validation")
        started = time.perf_counter()
        lines = self.validation.sample(step, trainer.state)
        self._raise(self._update(step, lines))
        metrics = trainer._metrics["train"]  # TRL logs their means with the step's other metrics
        metrics["validation/reward"].append(_reward(lines))
        if passed := _passed(lines):
            metrics["validation/accuracy"].append(statistics.fmean(passed.values()))
        metrics["time/validation"].append(time.perf_counter() - started)
        if self._best.get("step") == step:
            self._unsaved = control.should_save = True
        elif self.settings.early_stopping and self._passes_since_best >= self.settings.early_stopping:
            self.run.update(stopped_early={"step": step, "passes": self._passes_since_best})
            control.should_save = control.should_training_stop = True
            if distributed.is_main():
                passes = self._passes_since_best
                print(f"stopped early: no higher reward in {passes} validation passes", file=sys.stderr)

    def after_log(self, step: int, metrics: dict[str, Any]) -> None:
        """Check a step's metrics.

        Raises:
            RunError: an alarm in `--monitor.stop-on` was raised.
        """
        self._raise(self.alarms.step(step, distributed.broadcast_from_main(lambda: metrics)))

    def save_best(self, trainer: Any) -> None:
        """Save the adapter if it is the best and not saved yet. Called after its checkpoint is complete."""
        if self._unsaved:
            if distributed.is_main():
                save_adapter(trainer.model, trainer.processing_class, self.run.best)
            self.run.update(best=self._best)
            self._unsaved = False

    def _update(self, step: int, lines: Sequence[dict[str, Any]]) -> list[Alarm]:
        """Update the alarms and the best step with a validation pass."""
        reward, passed = _reward(lines), _passed(lines)
        alarms = self.alarms.validation(step, [line["reward"] for line in lines], passed)
        if not self._best or (reward > self._best["reward"] and not self.alarms.hacked):
            self._best, self._passes_since_best = {"step": step, "reward": reward}, 0
            if passed:
                self._best["accuracy"] = statistics.fmean(passed.values())
        else:
            self._passes_since_best += 1
        return alarms

    def _raise(self, alarms: Sequence[Alarm]) -> None:
        """Record and print alarms, and stop the run if one of them is in `--monitor.stop-on`."""
        for alarm in alarms:
            stops = alarm.name in self.settings.stop_on
            entry = {"step": alarm.step, "name": alarm.name, "message": alarm.message, "stopped": stops}
            self.run.update(alarms=[*self.run.record.get("alarms", []), entry])
            if stops:
                others = [name for name in self.settings.stop_on if name != alarm.name]
                raise RunError(
                    f"step {alarm.step}: {alarm.message} (the alarm {alarm.name} stops the run; to continue anyway: "
                    f"--resume {' '.join(['--monitor.stop-on', *others])})"
                )
            if distributed.is_main():
                print(f"alarm, step {alarm.step}: {alarm.name}: {alarm.message}", file=sys.stderr)


def discard_after(run: Run, step: int) -> None:
    """Delete what the monitor recorded after the checkpoint that the run resumes from."""
    for path in run.validation.glob("step-*.jsonl") if distributed.is_main() else ():
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
    if run.record.get("best", {}).get("step", 0) > step:
        del run.record["best"]
        if distributed.is_main():
            shutil.rmtree(run.best, ignore_errors=True)
    if run.record.get("stopped_early", {}).get("step", 0) > step:
        del run.record["stopped_early"]
    run.record["alarms"] = [alarm for alarm in run.record.get("alarms", []) if alarm["step"] <= step]


def _reward(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(line["reward"] for line in lines)


def _passed(lines: Sequence[dict[str, Any]]) -> dict[str, bool]:
    return {line["id"]: line["passed"] for line in lines if line["passed"] is not None}
