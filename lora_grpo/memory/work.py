"""The work of a run, with every completion at its maximum length, and the disk space of its files."""

from dataclasses import dataclass
from typing import Self

from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.files import json_files
from lora_grpo.runs import Run, duration, newest_step

_VOCABULARY_BYTES = 140
"""Size of the tokenizer's files per entry of the vocabulary."""


@dataclass(frozen=True)
class Work:
    """The remaining work of a run."""

    steps: int | None
    """None if only `--hours` limits the number of steps."""
    completions_per_step: int
    """Completions of all processes; in SFT, reference answers."""
    evaluated: int | None
    """Completions of each evaluation, before and after training; None if the number of rows is not known yet."""
    hours: float | None = None
    """Hours that are left for a run with `--hours`."""

    @classmethod
    def of(cls, config: RunConfig, *, resumed: bool = False) -> Self:
        """Return the work of a run, or the remaining work of a resumed one."""
        steps, hours, path = config.step_limit, config.hours, config.folder / "run.json"
        if resumed and path.is_file():
            record = json_files.read_object(path)
            if hours is not None:
                hours = max(0.0, hours - record.get("seconds_worked", 0.0) / 3600)
            if hours == 0 or Run(config, record).seems_trained():
                steps = 0
            elif steps is not None:
                steps = max(0, steps - newest_step(config.folder / "checkpoints"))
        rows, samples = config.data.eval_limit, config.eval.num_samples + 1  # 1 for greedy decoding
        evaluated = None if rows is None else rows * samples
        return cls(steps, batch_shape(config, world_size=1).completions_per_step, evaluated, hours)

    def text(self, config: RunConfig, length: int) -> str:
        """Return the work as one line, with rows of at most `length` tokens."""
        trained_on = "reference answers" if config.method == "sft" else "completions"
        time = duration(3600 * (self.hours or 0.0))
        if self.steps == 0:
            line = "no steps are left"
        elif self.steps is None:
            line = f"as many steps x {self.completions_per_step} {trained_on} as fit in {time}"
        else:
            total = self.steps * self.completions_per_step
            line = f"{self.steps:,} steps x {self.completions_per_step} = {total:,} {trained_on}"
            line += f", at most {count(total * length)} tokens"
            line += "" if self.hours is None else f", or as many as fit in {time}"
        line += f"; {self.evaluated:,} completions in each evaluation" if self.evaluated else ""
        also = config.eval.also_limit * len(config.eval.also)
        return line + (f"; {also:,} more in each for --eval.also" if also else "")


def disk_bytes(config: RunConfig, adapter: int, optimizer: int, vocabulary: int) -> int:
    """Return the size of a run's checkpoints and adapters, the largest files of its folder.

    `adapter` and `optimizer` are the bytes of the adapter and of its optimizer's state, `vocabulary` is a number of
    entries. A new checkpoint or adapter is complete before the old one is deleted.
    """
    saved = adapter + _VOCABULARY_BYTES * vocabulary
    checkpoints = min(config.train.keep_checkpoints, config.train.max_steps // config.train.checkpoint_steps) + 1
    return checkpoints * (saved + optimizer) + (3 if config.monitor.rows else 1) * saved  # adapter, best, next best


def count(number: float) -> str:
    """Format a count with three significant digits: 16.4 million."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return f"{number:,.0f}"
