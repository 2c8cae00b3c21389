"""The life of a run's folder: claim, open (create or resume), begin, update, finish, close, leave.

`claim_run` locks the folder before anything takes long, and `open_run` changes nothing in it. `Run.begin` writes
run.json, after everything that can refuse the run. Each event updates run.json. `Run.finish` marks the run complete;
`end_run` records any other end. Until the process ends or calls `leave_run`, no other process can use the folder.
"""

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lora_grpo import console, distributed
from lora_grpo.commands import own_command
from lora_grpo.config import Invocation, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import atomic, disk, json_files, lock
from lora_grpo.runs.reader import Line, git_revision, now, read_metrics, read_record, versions
from lora_grpo.runs.resuming import OR_ELSEWHERE, check_inputs, check_settings, resumes

T = TypeVar("T")

_ENTRIES = (
    # written by training and its evaluations
    "adapter",
    "best",
    "checkpoints",
    "completions",
    "evaluation",
    "filter",
    "start",
    "validation",
    # written by other commands
    "merged",
    ".merged.partial",
    ".merged.lock",
    "gguf",
    "best-merged",
    ".best-merged.partial",
    ".best-merged.lock",
    "best-gguf",
    "report",
    ".report.partial",
    "tensorboard",
    "verification.json",
    "metrics.jsonl",
    # last: until it is deleted, the folder is that of a run, and what is left of it can be overwritten
    "run.json",
)
"""Everything in a run's folder that `--overwrite` deletes, in this order."""

_POLICY_ENTRIES = (
    *("base_model", "revision", "fingerprint", "engine", "bits", "start_sha256", "teacher_sha256", "teacher_revision"),
)
"""Entries of a policy's record that a resumed run must share."""

_opened: list["Run"] = []
"""The run that this process opened last and that has not been closed or left: one or none."""


@dataclass(frozen=True)
class _Claim:
    """The lock of a folder in which no run has begun yet."""

    folder: Path
    new_parents: tuple[Path, ...]
    """The parents that were made for the folder, the nearest first."""

    def undo(self) -> None:
        """Release the folder. If it has no run, leave it as it was."""
        if not (self.folder / "run.json").exists():
            (self.folder / ".lock").unlink(missing_ok=True)  # while it is locked
            for folder in (self.folder, *self.new_parents):
                with contextlib.suppress(OSError):  # not empty: it existed before, or others use it
                    folder.rmdir()
        lock.release(self.folder)


_claims: list[_Claim] = []
"""The claim of this process that no run has taken over: one or none."""


class Run:
    """An open run folder. If several processes train, only the first of them writes it."""

    def __init__(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.config = config
        self.record = record
        """run.json."""
        self.begun = False
        """Whether this process has written run.json."""
        self.claim: _Claim | None = None
        """The lock of the folder, in the process that writes it."""
        self._opened_at = self.clock()
        self._worked_before: float = record.get("seconds_worked", 0.0)

        self.folder = config.folder
        self.adapter = self.folder / "adapter"
        """The trained adapter. Exists only when training is finished."""
        self.best = self.folder / "best"
        """The adapter of the step with the highest validation reward."""
        self.checkpoints = self.folder / "checkpoints"
        self.completions = self.folder / "completions"
        self.validation = self.folder / "validation"
        self.evaluation = self.folder / "evaluation"
        self.filter = self.folder / "filter"
        self.metrics = self.folder / "metrics.jsonl"

    # The life of a run, in this order

    def resolve(self, config: RunConfig, entries: Mapping[str, Any]) -> None:
        """Take the configuration that the plan resolved, and its entries of run.json. Call this before `begin`."""
        self.config = config
        self.record |= {"config": config.to_dict(), **entries}

    def begin(self, policy_record: dict[str, Any]) -> None:
        """Mark the run as running and write run.json. Call this after everything that can raise a UserError.

        A new run first deletes the files of an old run in the folder.

        Raises:
            UserError: the base model of a resumed run has changed.
        """
        if self.is_resumed:
            self._check_policy(policy_record)
        else:
            self.once(self._delete_old_run)
        self.begun = True
        self.record.pop("error", None)  # of the attempt that is now resumed
        self.update(status="running", policy=policy_record, processes=self.config.processes)

    def update(self, **entries: Any) -> None:
        """Add entries and `seconds_worked` to run.json."""
        self.record.update(entries, seconds_worked=round(self.seconds_worked, 1))
        if distributed.is_main():
            atomic.write_json(self.folder / "run.json", self.record)

    def append_metrics(self, line: Line) -> None:
        """Append the line of one step to metrics.jsonl."""
        if distributed.is_main():
            json_files.append_lines(self.metrics, [line])

    def discard_metrics_after(self, step: int) -> None:
        """Remove the lines of later steps and an incomplete last line from metrics.jsonl."""
        remaining = [line for line in read_metrics(self.folder) if line["step"] <= step]
        if self.metrics.exists():
            atomic.write_text(self.metrics, json_files.dump_lines(remaining))

    def finish(self, results: dict[str, Any]) -> None:
        """Mark the run complete."""
        self.update(status="complete", ended=now(), results=results)

    def once(self, function: Callable[[], T]) -> T:
        """Call a function that writes into the folder, or reads the folder or the clock, and return its result.

        If several processes train, one of them calls it. The others wait, and get the same result. Each of them must
        call this method.
        """
        return distributed.once(function)

    # What is known about it

    @property
    def is_resumed(self) -> bool:
        """Whether the folder already contains this run."""
        return "policy" in self.record

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done and the adapter is saved."""
        return self.once(lambda: self.is_trained_here)

    @property
    def is_trained_here(self) -> bool:
        """`is_trained` as this process sees the folder. It can be read before the processes are connected."""
        has_all_steps = self.record.get("trained_steps") == self.config.train.max_steps
        has_ended = has_all_steps or self.stopped_early_at is not None or self.out_of_time_at is not None
        return has_ended and self.adapter.is_dir()

    @property
    def stopped_early_at(self) -> int | None:
        """Step after which early stopping ended training. None if it did not, or if the patience is now higher or 0."""
        stopped = self.record.get("stopped_early")
        patience = self.config.monitor.early_stopping
        if stopped and 0 < patience <= stopped["passes"]:
            return int(stopped["step"])
        return None

    @property
    def out_of_time_at(self) -> int | None:
        """Step after which `hours` ended training. None if they did not, or if the run may now take longer."""
        ended = self.record.get("out_of_time")
        hours = self.config.hours
        if ended and hours and hours <= ended["hours"]:
            return int(ended["step"])
        return None

    @property
    def seconds_worked(self) -> float:
        """Seconds that the run's processes have worked, without the time between stop and resume."""
        return self._worked_before + self.seconds_open

    @property
    def seconds_open(self) -> float:
        """Seconds since this process opened the run."""
        return self.clock() - self._opened_at

    @staticmethod
    def clock() -> float:
        """Return the time in seconds since an arbitrary moment. Tests replace it."""
        return time.monotonic()

    def _delete_old_run(self) -> None:
        for name in _ENTRIES:
            _delete(self.folder / name)

    def _check_policy(self, policy_record: Mapping[str, Any]) -> None:
        """Raise a UserError if a resumed run would continue with another base model, start or teacher."""
        before = self.record["policy"]
        for name in _POLICY_ENTRIES:
            if before.get(name) != policy_record.get(name):
                raise UserError(
                    f"the run in {self.folder} began with {name} {before.get(name)!r}, now it is "
                    f"{policy_record.get(name)!r}; restore it, or pass another --output-dir"
                )


def claim_run(config: RunConfig, invocation: Invocation) -> None:
    """Make and lock the folder of a run that is being prepared, which `lora-grpo watch` waits for. Then `open_run`.

    Raises:
        UserError: the folder contains a run, and `invocation` neither resumes nor overwrites it; it contains other
            files; or another process uses it.
    """
    folder = config.folder
    has_run = (folder / "run.json").is_file()
    if has_run and not (invocation.resume or invocation.overwrite):
        raise UserError(f"{folder} contains a run; pass --resume to continue, --overwrite to delete it, {OR_ELSEWHERE}")
    if not has_run:
        _check_empty(folder)

    # Only rank 0 writes, so only rank 0 locks the folder.
    if distributed.is_main():
        new_parents = tuple(parent for parent in folder.parents if not parent.exists())
        lock.claim(folder)
        _claims[:] = [_Claim(folder, new_parents)]


def open_run(
    config: RunConfig,
    invocation: Invocation,
    recipe: str,
    data_record: dict[str, Any],
    entries: Mapping[str, Any] | None = None,
) -> Run:
    """Open a new run in the folder that `claim_run` has locked, or the run in it to resume it.

    If it raises, the folder remains claimed: `end_run` releases it.

    Args:
        data_record: the entry `data` of run.json.
        entries: further entries, such as `user_files` and `python_objects`.

    Raises:
        UserError: the settings, the rows or the user's code of a resumed run differ.
    """
    folder = config.folder
    entries = entries or {}
    if resumes(folder, invocation):
        check_settings(config)
        record = _resumed_record(folder, data_record, entries)
    else:
        if invocation.resume:
            console.note(f"nothing to resume in {folder}: the run starts at step 0")
        record = _new_record(recipe, data_record)
    run = Run(config, {**record, "config": config.to_dict(), **entries})
    if distributed.is_main():
        run.claim = _claims.pop()
    _opened[:] = [run]
    return run


def close_run(status: str, error: str | None = None) -> None:
    """Record in run.json that the open run of this process ended as `failed` or `interrupted`, and why.

    If the run has not begun, leave its folder as it was. Without an open run or a claim, do nothing.
    """
    while _claims:
        _claims.pop().undo()
    if not _opened:
        return
    run = _opened.pop()
    if run.begun:
        if run.record["status"] != "complete":
            # If it cannot be written, the status remains `running`, which readers show as killed.
            with contextlib.suppress(disk.DiskFullError, OSError):
                run.update(status=status, ended=now(), error=error)
    elif run.claim:
        with contextlib.suppress(OSError):  # not empty: it existed before
            run.checkpoints.rmdir()
        run.claim.undo()


def leave_run() -> None:
    """Let other runs use the folder of the open run, which is complete, and this process.

    The end of the process has the same effect. Without an open run, do nothing.
    """
    while _opened:
        lock.release(_opened.pop().folder)


def begun_run() -> Run | None:
    """Return the open run of this process if its run.json is written, else None."""
    if _opened and _opened[0].begun:
        return _opened[0]
    return None


def _check_empty(folder: Path) -> None:
    """Raise a UserError if a folder without a run.json contains files of someone else.

    Without a run.json, no file belongs to a run, not even a folder named `adapter`: `Run.begin` deletes the old
    run.json last and writes the new one first. A kill in between leaves only temporary dot files, and the empty folder
    that the trainer makes for its checkpoints.
    """
    if not folder.is_dir():
        return
    foreign = []
    for path in sorted(folder.iterdir()):
        is_left_by_trainer = path.name == "checkpoints" and path.is_dir() and not any(path.iterdir())
        if not path.name.startswith(".") and not is_left_by_trainer:
            foreign.append(path.name)
    if foreign:
        raise UserError(f"{folder} contains other files ({', '.join(foreign[:3])}); pass an empty or new --output-dir")


def _new_record(recipe: str, data_record: dict[str, Any]) -> dict[str, Any]:
    """Return the run.json of a new run, without its configuration."""
    return {
        "lora_grpo_run": 1,
        "recipe": recipe,
        "started": now(),
        "command": own_command(),
        "data": data_record,
        "versions": versions(),
        "git_revision": git_revision(),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
    }


def _resumed_record(folder: Path, data_record: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run.json of the run in a folder, with a note that it is resumed.

    Raises:
        UserError: it is damaged, or rows or the user's code have changed since the run began.
    """
    record = read_record(folder)
    check_inputs(folder, record, data_record, entries.get("user_files", {}), entries.get("python_objects", {}))
    isolation_before = record["data"].get("sandbox")
    isolation_now = data_record.get("sandbox")
    if isolation_before and isolation_now and isolation_now not in isolation_before:
        record["data"]["sandbox"] = f"{isolation_before}; resumed with {isolation_now}"
    record["resumed"] = [*record.get("resumed", []), now()]
    return record


def _delete(path: Path) -> None:
    """Delete a file, a folder, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
