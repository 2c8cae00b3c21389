"""Train from step 0 or the newest checkpoint, and save the adapter."""

import resource
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from lora_grpo import console, distributed
from lora_grpo.errors import Interrupted, RunError
from lora_grpo.grading import Row
from lora_grpo.models import Policy, load_adapter, save_adapter
from lora_grpo.rewards import training_set
from lora_grpo.runs import Run, newest_complete
from lora_grpo.training.trl_config import naming_overrides


def train(run: Run, policy: Policy, trainer: Any, rows: Sequence[Row] | None = None) -> None:
    """Train the policy's adapter and save it in the run's `adapter/` folder.

    If the run is finished, only load its adapter. A killed run resumes from its newest complete checkpoint. Rows from
    `filter_by_difficulty` replace the trainer's own.

    Raises:
        Interrupted: SIGTERM or Ctrl-C was received. A checkpoint was saved first.
        RunError: the GPU ran out of memory.
    """
    max_steps = run.config.train.max_steps
    if run.is_trained:
        load_adapter(policy.model, run.adapter)
        if run.stopped_early:
            message = f"stopped early after step {run.stopped_early}; --monitor.early-stopping 0 continues"
            console.note(message)
        return
    if rows is not None:
        trainer.train_dataset = training_set(policy.tokenizer, rows, range(len(rows)))
    policy.model.enable_adapter_layers()  # evaluating the base may have disabled them
    checkpoint, done = distributed.broadcast_from_main(lambda: newest_complete(run.checkpoints)) or (None, 0)
    _discard_after(run, done)
    if checkpoint:
        console.note(f"resuming from {checkpoint}")
    if checkpoint and done in (max_steps, run.stopped_early, run.out_of_time):
        load_adapter(policy.model, checkpoint)  # killed after the last checkpoint, before the adapter was saved
    else:
        _run_trainer(run, trainer, checkpoint)
    steps = run.stopped_early or run.out_of_time or max_steps
    if run.stopped_early and "best" in run.record:
        load_adapter(policy.model, run.best)
        steps = run.record["best"]["step"]
    if distributed.is_main():
        save_adapter(policy.model, policy.tokenizer, run.adapter)
    run.update(trained_steps=steps)


class StopOnSignal:
    """Context manager: the first SIGINT or SIGTERM saves a checkpoint and stops, a second one stops immediately."""

    caught = 0

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: object) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
        console.note("stopping after this step; a second signal stops immediately")

    def signal_number(self) -> int:
        """Return the signal that any rank caught, or 0. Call it on all ranks, so that they stop after the same step."""
        return max(distributed.gather(self.caught))


def _run_trainer(run: Run, trainer: Any, checkpoint: Path | None) -> None:
    import torch

    started = time.monotonic()
    with StopOnSignal() as trainer.stop:
        try:
            with naming_overrides(run.config, RunError):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"the GPU ran out of memory in step {trainer.state.global_step + 1}; pass --resume "
                f"--train.micro-batch-size {max(1, trainer.args.per_device_train_batch_size // 2)}, or start over with "
                f"a smaller --sampling.max-completion-tokens ({' '.join(str(error).split())})"
            ) from error
        finally:
            trainer.progress.close()
    on_gpu = torch.cuda.is_available()
    run.update(
        seconds_training=round(run.record.get("seconds_training", 0) + time.monotonic() - started, 1),
        peak_memory_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2, 2),
        peak_gpu_memory_gib=round(torch.cuda.max_memory_allocated() / 1024**3, 2) if on_gpu else None,
    )
    if signal_number := trainer.stop.signal_number():
        steps = trainer.state.global_step
        of_all = f" of {run.config.step_limit}" if run.config.step_limit else ""
        raise Interrupted(f"stopped after step {steps}{of_all}, saved", signal_number)


def _discard_after(run: Run, step: int) -> None:
    """Delete what was recorded after the checkpoint that the run resumes from. Those steps run again."""
    for entry in ("best", "stopped_early", "out_of_time"):
        if run.record.get(entry, {}).get("step", 0) > step:
            del run.record[entry]
    run.record.get("evaluation_seconds", {}).pop("trained", None)
    run.record["alarms"] = [alarm for alarm in run.record.get("alarms", []) if alarm["step"] <= step]
    if distributed.is_main():
        if "best" not in run.record:
            shutil.rmtree(run.best, ignore_errors=True)
        shutil.rmtree(run.adapter, ignore_errors=True)
        for samples in run.evaluation.glob("trained.samples.jsonl*"):
            samples.unlink()
        run.checkpoints.mkdir(exist_ok=True)
        run.completions.mkdir(exist_ok=True)
        for leftover in (*run.checkpoints.glob(".*"), *run.completions.glob(".*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        run.discard_metrics_after(step)
        for path in (*run.completions.glob("step-*.jsonl"), *run.validation.glob("step-*.jsonl")):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
    distributed.barrier()
