"""Atomic training checkpoints: each is either complete or absent."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.errors import RunError
from lora_grpo.files import atomic, disk

_PREFIX = "checkpoint-"


class AtomicCheckpoints:
    """Mixin that writes a checkpoint to a staging folder, then renames it. List it before transformers' Trainer.

    The Trainer writes files directly into the final folder, in `_get_output_dir`. If the process is killed during the
    write, a checkpoint remains that looks complete. Every rank writes its random state. Rank 0 writes the rest and
    renames the folder.
    """

    keep_checkpoints: int
    _staging: Path | None = None
    """The folder that the Trainer takes for the output folder during a save."""

    def _get_output_dir(self, trial: Any) -> str:
        if self._staging:
            return str(self._staging)
        return super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        name = f"{_PREFIX}{self.state.global_step}"  # type: ignore[attr-defined]
        self._staging = folder / ".partial"
        with disk.writing(folder / name):
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                distributed.once(lambda: self._publish_checkpoint(folder, name))
            except BaseException:
                if self.args.should_save:  # type: ignore[attr-defined]
                    shutil.rmtree(self._staging, ignore_errors=True)
                raise
            finally:
                self._staging = None

    def _publish_checkpoint(self, folder: Path, name: str) -> None:
        """Move a checkpoint, to which every rank has written, out of the staging folder, and delete the oldest one."""
        assert self._staging
        # TRL's copy of the adapter for the KL penalty, and a teacher's adapter. If a checkpoint has one of them,
        # transformers (5.17) loads it alone, and not the trained adapter.
        for other_adapter in ("ref", "teacher"):
            shutil.rmtree(self._staging / name / other_adapter, ignore_errors=True)
        atomic.publish(self._staging / name, folder / name)
        for checkpoint in checkpoints_in(folder)[self.keep_checkpoints :]:
            shutil.rmtree(checkpoint.path)
        shutil.rmtree(self._staging, ignore_errors=True)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Without this override, TRL would write a README.md to every checkpoint."""


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A folder that has the name of a checkpoint. Its files may be damaged."""

    step: int
    """Training steps done."""
    path: Path


def newest_complete(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint. Report and delete damaged ones that are newer.

    Raises:
        RunError: all checkpoints are damaged. None is deleted.
    """
    damage_of: dict[Path, str] = {}  # by path, newest first
    for checkpoint in checkpoints_in(folder):
        damage = atomic.damage(checkpoint.path)
        if damage:
            damage_of[checkpoint.path] = damage
            continue
        for newer, reason in damage_of.items():
            console.note(f"skipped damaged {newer}: {reason}")
            shutil.rmtree(newer)
        return checkpoint
    if damage_of:
        newest, reason = next(iter(damage_of.items()))
        raise RunError(
            f"every checkpoint is damaged ({newest}: {reason}); restore one, or start from the beginning with "
            "--overwrite instead of --resume"
        )
    return None


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, based only on folder names; 0 if there is none."""
    checkpoints = checkpoints_in(folder)
    return checkpoints[0].step if checkpoints else 0


def saved_bytes(folder: Path) -> int:
    """Return the size of the checkpoints and adapters of a run."""
    total = 0
    for name in ("checkpoints", "adapter", "best"):
        total += sum(file.stat().st_size for file in (folder / name).rglob("*") if file.is_file())
    return total


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in a folder, newest first."""
    checkpoints = []
    for path in folder.glob(f"{_PREFIX}*"):
        step = path.name.removeprefix(_PREFIX)
        if step.isdigit():
            checkpoints.append(Checkpoint(int(step), path))
    return sorted(checkpoints, reverse=True)
