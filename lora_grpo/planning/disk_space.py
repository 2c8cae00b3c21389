"""Estimates how much a run writes to its folder, and how much of it fits on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_grpo.config import RunConfig
from lora_grpo.files import disk
from lora_grpo.planning.duration import Work
from lora_grpo.planning.fit import Fit
from lora_grpo.runs import saved_bytes

_VOCABULARY_BYTES = 140
"""Size of the tokenizer's files per entry of the vocabulary."""
_TOKEN_BYTES, _LINE_BYTES = 4, 500
"""Size of a token of English text, and of the other entries of a sample."""
_COPIES = 3
"""Samples are in their own file, on the page of the report, and on the page that replaces it."""


@dataclass(frozen=True)
class DiskSpace:
    """What a run writes, in bytes."""

    folder: Path
    num_bytes: int
    """Estimate of the largest size of the folder during the run, without `merged` and `gguf`."""
    existing: int
    """Bytes of it that a resumed or replaced run has already written."""
    resumed: bool
    every_1000_steps: int | None = None
    """Bytes of the texts of 1,000 steps if the number of steps is unknown, so that `num_bytes` is without them."""

    @classmethod
    def of(cls, config: RunConfig, work: Work, fit: Fit, vocabulary: int, *, resumed: bool) -> DiskSpace:
        """Estimate the files of a run. A new checkpoint or adapter is complete before the old one is deleted."""
        saved = fit.parts["adapter"] + _VOCABULARY_BYTES * vocabulary
        checkpoints = (config.train.keep_checkpoints + 1) * (saved + fit.parts["optimizer"])
        adapters = (3 if config.monitor.rows else 1) * saved  # `adapter`, `best` and the next `best`

        def logged(steps: int) -> int:
            texts = 0
            if config.method == "grpo":
                texts = (1 + steps // config.train.completions_steps) * work.completions_per_step
            if config.monitor.rows:
                texts += (1 + steps // config.monitor.every_steps) * config.monitor.rows
            return texts

        sample = _TOKEN_BYTES * (work.prompt_tokens + work.completion_tokens) + _LINE_BYTES
        evaluated = 2 * (work.evaluated or 0) // work.evaluations  # those of a resumed run are among the existing bytes
        texts = _COPIES * (logged(work.steps) + evaluated) * sample
        unknown = work.hours is not None and work.fewest_steps is None
        every_1000_steps = _COPIES * logged(1000) * sample if unknown else None
        planned = checkpoints + adapters + texts
        return cls(config.folder, planned, saved_bytes(config.folder), resumed, every_1000_steps)

    def check(self) -> None:
        """Raise a UserError if the disk is too small."""
        fix = "" if self.resumed else ", or pass an --output-dir on another disk"
        disk.check_free_space(self.folder, self.num_bytes - self.existing, fix)

    def text(self) -> str:
        """Return the estimate as one line."""
        existing = f", {disk.size(self.existing)} of it already there" if self.existing else ""
        _, free = disk.free_space(self.folder)
        more = f", and {disk.size(self.every_1000_steps)} for every 1,000 steps" if self.every_1000_steps else ""
        return f"about {disk.size(self.num_bytes)} in {self.folder}{existing}{more}; {disk.size(free)} are free"
