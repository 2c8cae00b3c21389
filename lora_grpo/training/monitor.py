"""The watch over a training run: alarms, held-out passes, the best adapter, early stopping."""

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
    """Looks at every step of a run.

    Args:
        run: the open run; alarms and the best step go to run.json, the best adapter to `best/`.
        health: the watches.
        validation: asks the validation_rows rows; None where there are none.
    """

    def __init__(self, run: Run, health: Alarms, validation: Validation | None) -> None:
        self.run, self.health, self.validation = run, health, validation
        self.settings = run.config.monitor
        self._best: tuple[float, int] | None = None
        self._accuracy: float | None = None
        self._passes_since_best = 0
        self._unsaved = False

    def begin(self, trainer: Any) -> None:
        """Take up where the run stands: its earlier steps are looked at in silence, and the base is asked."""
        step = trainer.state.global_step
        passes = self.validation.earlier() if self.validation else {}
        if step and 0 in passes:
            self._look_at(0, passes[0])
        for metrics in distributed.broadcast_from_main(lambda: read_metrics(self.run.folder)):
            number = metrics["step"]
            self.health.step(number, metrics)
            if number in passes:
                self._look_at(number, passes[number])
        if not step and self.validation and self.run.config.train.max_steps >= self.settings.every_steps:
            self._alarm(self._look_at(0, self.validation.ask(0, trainer.state)))
        # Killed after the checkpoint of the best step and before its adapter.
        self._unsaved = bool(self._best and self._best[1] == step > 0)
        self.save_best(trainer)

    def after_step(self, trainer: Any, control: Any) -> None:
        """Ask the held-out rows where it is their turn; a new best becomes a checkpoint, and then `best/`."""
        step, uses = trainer.state.global_step, trainer.num_iterations
        # Between two uses of the same rollouts there are no checkpoints.
        is_turn = step % uses == 0 and step // self.settings.every_steps > (step - uses) // self.settings.every_steps
        if not self.validation or not is_turn:
            return
        trainer.on_phase("held out")
        started = time.perf_counter()
        lines = self.validation.ask(step, trainer.state)
        self._alarm(self._look_at(step, lines))
        noted = trainer._metrics["train"]  # TRL's: it logs their means with the step's other metrics
        noted["validation/reward"].append(_reward(lines))
        if passed := _passed(lines):
            noted["validation/accuracy"].append(statistics.fmean(passed.values()))
        noted["time/validation"].append(time.perf_counter() - started)
        if self._best and self._best[1] == step:
            self._unsaved = control.should_save = True
        elif self.settings.early_stopping and self._passes_since_best >= self.settings.early_stopping:
            self.run.update(stopped_early={"step": step, "passes": self._passes_since_best})
            control.should_save = control.should_training_stop = True
            if distributed.is_main():
                print(f"stopped early: {self._passes_since_best} passes brought no higher reward", file=sys.stderr)

    def after_log(self, step: int, metrics: dict[str, Any]) -> None:
        """Look at a step's metrics.

        Raises:
            RunError: a watch fired that is to stop the run.
        """
        self._alarm(self.health.step(step, distributed.broadcast_from_main(lambda: metrics)))

    def save_best(self, trainer: Any) -> None:
        """Keep the adapter as it is, if it is the best and not kept yet; to be called when its checkpoint is whole."""
        if not self._unsaved or not self._best:
            return
        reward, step = self._best
        best = {"step": step, "reward": reward} | ({} if self._accuracy is None else {"accuracy": self._accuracy})
        if distributed.is_main():
            save_adapter(trainer.model, trainer.processing_class, self.run.best)
        self.run.update(best=best)
        self._unsaved = False

    def _look_at(self, step: int, lines: Sequence[dict[str, Any]]) -> list[Alarm]:
        """Take a held-out pass into account."""
        reward = _reward(lines)
        alarms = self.health.validation(step, [line["reward"] for line in lines], _passed(lines))
        if self._best is None or (reward > self._best[0] and not self.health.hacked):
            self._best, self._passes_since_best = (reward, step), 0
            self._accuracy = statistics.fmean(_passed(lines).values()) if _passed(lines) else None
        else:
            self._passes_since_best += 1
        return alarms

    def _alarm(self, alarms: Sequence[Alarm]) -> None:
        """Write alarms down, say them, and stop the run if one of them is to."""
        for alarm in alarms:
            stops = alarm.name in self.settings.stop_on
            entry = {"step": alarm.step, "name": alarm.name, "message": alarm.message, "stopped": stops}
            self.run.update(alarms=[*self.run.record.get("alarms", []), entry])
            if stops:
                others = [name for name in self.settings.stop_on if name != alarm.name]
                left = " ".join(["--monitor.stop-on", *others])
                raise RunError(
                    f"step {alarm.step}: {alarm.message} (the alarm {alarm.name} stops a run; to go on all the same: "
                    f"--resume {left})"
                )
            if distributed.is_main():
                print(f"alarm, step {alarm.step}: {alarm.name}: {alarm.message}", file=sys.stderr)


def discard_after(run: Run, step: int) -> None:
    """Drop what the watch noted after the checkpoint that a run goes on from."""
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
