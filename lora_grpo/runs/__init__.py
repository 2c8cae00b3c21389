"""A run's folder: run.json, checkpoints, and how they are read back."""

from lora_grpo.runs.checkpoints import AtomicCheckpoints, newest_complete, newest_step
from lora_grpo.runs.reader import Line, RunFiles, read_run
from lora_grpo.runs.record import Run, begun_run, close_run, flat, git_revision, now, open_run, read_record, versions

__all__ = [
    "AtomicCheckpoints",
    "Line",
    "Run",
    "RunFiles",
    "begun_run",
    "close_run",
    "flat",
    "git_revision",
    "newest_complete",
    "newest_step",
    "now",
    "open_run",
    "read_record",
    "read_run",
    "versions",
]
