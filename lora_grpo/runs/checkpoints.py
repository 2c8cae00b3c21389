"""Training checkpoints that are complete or absent."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.files import atomic

_PREFIX = "checkpoint-"


class AtomicCheckpoints:
    """Mixed in before a transformers Trainer: a checkpoint is built in a staging folder and renamed when it is whole.

    The Trainer itself writes a checkpoint's files one after another into their final folder, and a process killed in
    between leaves one that looks resumable. Every rank writes its random state; rank 0 writes the rest and renames.
    """

    keep_checkpoints: int
    """Newest checkpoints that are kept."""
    _staging: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        self._staging = folder / ".partial"
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            distributed.barrier()
            if self.args.should_save:  # type: ignore[attr-defined]
                name = f"{_PREFIX}{self.state.global_step}"  # type: ignore[attr-defined]
                atomic.publish(self._staging / name, folder / name)
                for _, old in _found(folder)[self.keep_checkpoints :]:
                    shutil.rmtree(old)
        finally:
            if distributed.is_main():
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        distributed.barrier()  # or the next one might be begun in a folder that is being removed

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL writes a README.md at every checkpoint; the run has run.json instead."""


def newest_complete(folder: Path) -> tuple[Path, int] | None:
    """Return the newest checkpoint whose every file is as it was written, and its step.

    Damaged ones are passed over, said and deleted.
    """
    for step, path in _found(folder):
        reason = atomic.damage(path)
        if reason is None:
            return path, step
        print(f"passed over {path}: {reason}", file=sys.stderr)
        shutil.rmtree(path)
    return None


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint by its name alone, 0 where there is none."""
    return max((step for step, _ in _found(folder)), default=0)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a folder, newest first."""
    numbered = [
        (int(path.name.removeprefix(_PREFIX)), path)
        for path in folder.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(numbered, reverse=True)
