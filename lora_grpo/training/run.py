"""Train from step 0 or the newest checkpoint, and save the adapter.

A resumed run computes the same steps, bit for bit on a CPU, as one that was never killed. What this rests on:

- The order of all rows is computed before the first step (`data/order.py`).
- Seeds of completions depend on the run's seed, the step and the index alone (`StepSampling.seeds`).
- A checkpoint has the adapter, the optimizer, the scheduler and the random states, and is whole or absent.
- What was recorded after the checkpoint is discarded (`_discard_after`), and the monitor replays what was recorded
  before it. No checkpoint is saved between two steps that use the same rollouts.
- The logprob check and validation leave torch's random state as it was.
- `ddp_find_unused_parameters` keeps the order in which several processes sum gradients (`trl_config.py`).
- Other rows, files of the user or settings than before are refused (`runs/resuming.py`).
"""

import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lora_grpo import console
from lora_grpo.config import smaller_micro_batch
from lora_grpo.errors import Interrupted, RunError
from lora_grpo.grading import Row
from lora_grpo.memory import GIB
from lora_grpo.models import load_adapter, save_adapter
from lora_grpo.monitoring import START_OVER
from lora_grpo.rewards import training_set
from lora_grpo.runs import Run, newest_complete
from lora_grpo.training.prepare import Training
from lora_grpo.training.trl_config import naming_overrides


def train(training: Training, rows: Sequence[Row] | None = None) -> None:
    """Train the policy's adapter and save it in the run's `adapter/` folder.

    If the run is finished, only load its adapter. A killed run resumes from its newest complete checkpoint. Rows from
    `filter_by_difficulty` replace the trainer's own.

    Raises:
        Interrupted: SIGTERM or Ctrl-C was received. A checkpoint was saved first.
        RunError: the GPU ran out of memory.
    """
    run = training.run
    policy = training.policy
    if run.is_trained:
        load_adapter(policy.model, run.adapter)
        if run.stopped_early_at:
            message = f"stopped early after step {run.stopped_early_at}; --monitor.early-stopping 0 continues"
            console.note(message)
        return
    if rows is not None:
        training.trainer.train_dataset = training_set(policy.tokenizer, rows, range(len(rows)))
    policy.model.enable_adapter_layers()  # evaluating the base may have disabled them

    # Find the newest checkpoint. One process decides, because it may delete damaged ones.
    newest = run.once(lambda: newest_complete(run.checkpoints))
    steps_done = newest.step if newest else 0
    _discard_after(run, steps_done)
    if newest:
        console.note(f"resuming from {newest.path}")

    # Train, unless the run was killed after its last checkpoint and before the adapter, or the best one, was saved.
    last_steps = (run.config.train.max_steps, run.stopped_early_at, run.out_of_time_at)
    if newest and steps_done in last_steps:
        load_adapter(policy.model, newest.path)
        training.monitor.restore(steps_done)
    else:
        _run_trainer(training, newest.path if newest else None, steps_done)

    # Save the adapter: after early stopping the best one, otherwise the last one.
    if run.stopped_early_at and "best" in run.record:
        load_adapter(policy.model, run.best)
        trained_steps = run.record["best"]["step"]
    else:
        trained_steps = run.stopped_early_at or run.out_of_time_at or run.config.train.max_steps
    run.once(lambda: save_adapter(policy.model, policy.tokenizer, run.adapter))
    run.update(trained_steps=trained_steps)


def _run_trainer(training: Training, checkpoint: Path | None, steps_done: int) -> None:
    """Train from a checkpoint, after which the run has done `steps_done` steps, or from the beginning."""
    import torch

    run = training.run
    trainer = training.trainer
    started = time.monotonic()
    with training.stop:
        try:
            with naming_overrides(run.config, RunError, lambda: trainer.state.global_step > steps_done):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except torch.OutOfMemoryError as error:
            advice = START_OVER
            smaller_batch = smaller_micro_batch(run.config)
            if smaller_batch:
                advice = f"pass --resume --train.micro-batch-size {smaller_batch}, or {advice}"
            raise RunError(
                f"the GPU ran out of memory in step {trainer.state.global_step + 1}; {advice} "
                f"({' '.join(str(error).split())})"
            ) from error
        finally:
            training.progress.close()

    # Record the time and the memory, of all sessions of a resumed run.
    seconds = run.record.get("seconds_training", 0) + time.monotonic() - started
    peak_memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_gpu_memory_gib = run.record.get("peak_gpu_memory_gib")  # None on a CPU
    peaks = trainer.step_metrics.peaks
    if peaks.highest:
        peak_gpu_memory_gib = max(peak_gpu_memory_gib or 0.0, round(max(peaks.highest.values()) / GIB, 2))
    torch_peak = peaks.highest_allocated
    if torch.cuda.is_available():
        torch_peak = max(torch_peak, torch.cuda.max_memory_allocated())  # since the last phase
    run.update(
        seconds_training=round(seconds, 1),
        peak_memory_gib=round(peak_memory_kib / 1024**2, 2),
        peak_gpu_memory_gib=peak_gpu_memory_gib,
        torch_peak_gib=round(torch_peak / GIB, 2) if torch_peak else None,
    )

    # A signal has ended training, so it ends the command.
    signal_number = training.stop.signal_number()
    if signal_number:
        of_all_steps = f" of {run.config.step_limit}" if run.config.step_limit else ""
        raise Interrupted(f"stopped after step {trainer.state.global_step}{of_all_steps}, saved", signal_number)


def _discard_after(run: Run, step: int) -> None:
    """Delete what was recorded after the checkpoint that the run resumes from. Those steps run again.

    What once ended training is also deleted if its limit was lifted.
    """
    if run.stopped_early_at is None:
        run.record.pop("stopped_early", None)
    if run.out_of_time_at is None:
        run.record.pop("out_of_time", None)
    for entry in ("best", "stopped_early", "out_of_time"):
        if run.record.get(entry, {}).get("step", 0) > step:
            del run.record[entry]
    run.record.get("evaluation_seconds", {}).pop("trained", None)
    run.record["alarms"] = [alarm for alarm in run.record.get("alarms", []) if alarm["step"] <= step]
    run.once(lambda: _delete_files_after(run, step))


def _delete_files_after(run: Run, step: int) -> None:
    """Delete the files of later steps, and unfinished ones."""
    if "best" not in run.record:
        shutil.rmtree(run.best, ignore_errors=True)
    shutil.rmtree(run.adapter, ignore_errors=True)
    for samples in run.evaluation.glob("trained.samples.jsonl*"):
        samples.unlink()
    run.checkpoints.mkdir(exist_ok=True)
    run.completions.mkdir(exist_ok=True)
    for leftover in (*run.checkpoints.glob(".*"), *run.completions.glob(".*")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    run.discard_metrics_after(step)
    for path in (*run.completions.glob("step-*.jsonl"), *run.validation.glob("step-*.jsonl")):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
