"""The work of a run, with every completion at its maximum length, and the disk space of its files."""

from dataclasses import dataclass
from typing import Self

from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.files import json_files
from lora_grpo.runs import Run, newest_step

_VOCABULARY_BYTES = 140
"""Size of the tokenizer's files per entry of the vocabulary."""


@dataclass(frozen=True)
class Work:
    """The remaining work of a run."""

    steps: int | None
    """None if only `--hours` limits the number of steps."""
    completions_per_step: int
    """Completions of all processes; in SFT, reference answers."""
    completions_per_evaluation: int | None
    """For the evaluations before and after training; None if the number of rows is not known yet."""
    hours: float | None = None
    """Hours that are left for a run with `--hours`."""

    @classmethod
    def of(cls, config: RunConfig, *, resumed: bool = False) -> Self:
        """Return the work of a run, or the remaining work of a resumed one."""
        steps = config.step_limit
        hours = config.hours
        path = config.folder / "run.json"
        if resumed and path.is_file():
            record = json_files.read_object(path)
            if hours is not None:
                hours = max(0.0, hours - record.get("seconds_worked", 0.0) / 3600)
            if hours == 0 or Run(config, record).is_trained_here:
                steps = 0
            elif steps is not None:
                steps = max(0, steps - newest_step(config.folder / "checkpoints"))

        completions_per_evaluation = None
        if config.data.eval_limit is not None:
            answers_per_row = config.eval.num_samples + 1  # 1 for greedy decoding
            completions_per_evaluation = config.data.eval_limit * answers_per_row
        completions_per_step = batch_shape(config).completions_per_step
        return cls(steps, completions_per_step, completions_per_evaluation, hours)


def disk_bytes(config: RunConfig, adapter: int, optimizer: int, vocabulary: int) -> int:
    """Return the size of a run's checkpoints and adapters, the largest files of its folder.

    A new checkpoint or adapter is complete before the old one is deleted.

    Args:
        adapter: bytes of the adapter.
        optimizer: bytes of the state of the adapter's optimizer.
        vocabulary: number of entries of the tokenizer.
    """
    adapter_folder = adapter + _VOCABULARY_BYTES * vocabulary
    checkpoints_written = config.train.max_steps // config.train.checkpoint_steps
    checkpoints = min(config.train.keep_checkpoints, checkpoints_written) + 1
    adapters = 1
    if config.monitor.rows:
        adapters += 2  # the best one of the validation, and the next best while it is written
    return checkpoints * (adapter_folder + optimizer) + adapters * adapter_folder
