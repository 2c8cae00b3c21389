"""Estimates how much a run writes to its folder, and checks that it fits on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_grpo.config import RunConfig
from lora_grpo.files import disk
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.work import Work
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
    """Largest size of the folder during the run, without `merged` and `gguf`. Without the completions of the steps if
    only `--hours` limits their number."""
    existing: int
    """Bytes of it that a resumed or replaced run has already written."""

    @classmethod
    def of(cls, config: RunConfig, work: Work, fit: Fit, vocabulary: int) -> DiskSpace:
        """Estimate the files of a run. A new checkpoint or adapter is complete before the old one is deleted."""
        saved = fit.parts["adapter"] + _VOCABULARY_BYTES * vocabulary
        checkpoints = (config.train.keep_checkpoints + 1) * (saved + fit.parts["optimizer"])
        adapters = (3 if config.monitor.rows else 1) * saved  # `adapter`, `best` and the next `best`
        steps, samples = work.steps or 0, 2 * (work.evaluated or 0)
        if config.method == "grpo":
            samples += (1 + steps // config.train.completions_steps) * work.completions_per_step
        if config.monitor.rows:
            samples += (1 + steps // config.monitor.every_steps) * config.monitor.rows
        sample = _TOKEN_BYTES * (work.prompt_tokens + work.completion_tokens) + _LINE_BYTES
        num_bytes = checkpoints + adapters + _COPIES * samples * sample
        return cls(config.folder, num_bytes, saved_bytes(config.folder))

    def check(self, fix: str) -> None:
        """Raise a UserError if the disk is too small; `fix` ends the message."""
        disk.check_free_space(self.folder, self.num_bytes - self.existing, fix)

    def text(self) -> str:
        """Return the estimate as one line."""
        existing = f", {disk.size(self.existing)} of it already there" if self.existing else ""
        _, free = disk.free_space(self.folder)
        return f"about {disk.size(self.num_bytes)} in {self.folder}{existing}; {disk.size(free)} are free"
