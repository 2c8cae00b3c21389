"""The open run of this process: create, resume and close its folder."""

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.commands import own_command
from lora_grpo.config import Invocation, RunConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.files import atomic, disk, json_files, lock
from lora_grpo.runs.checkpoints import newest_step
from lora_grpo.runs.reader import Line, flat, git_revision, now, read_metrics, read_record, versions

_ENTRIES = (
    *("adapter", "best", "checkpoints", "completions", "evaluation", "filter", "start", "validation"),
    *("merged", ".merged.partial", "gguf", "best-merged", ".best-merged.partial", "best-gguf"),
    *("report", ".report.partial", "tensorboard"),
    *("metrics.jsonl", "run.json"),
)
_MAY_CHANGE = (
    *("output_dir", "hours", "model.gpu_memory_share", "sandbox.workers"),
    *("train.max_steps", "train.micro_batch_size", "train.checkpoint_steps", "train.keep_checkpoints"),
    *("train.report_to", "sampling.server_url", "sampling.server_folder"),
    *("monitor.stop_on", "monitor.early_stopping"),
)
"""Settings that a resumed run may change. They do not affect training, except that the micro-batch changes rounding."""
_ELSEWHERE = "or pass another --output-dir"


class Run:
    """An open run folder."""

    def __init__(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.config = config
        self.record = record
        """run.json."""
        self.begun = False
        """Whether this process has written run.json."""
        self._opened, self._worked_before = self.clock(), record.get("seconds_worked", 0.0)
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

    @staticmethod
    def clock() -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    @property
    def is_resumed(self) -> bool:
        """Whether the folder already contains this run."""
        return "policy" in self.record

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done and the adapter is saved; the same on every rank."""
        return distributed.broadcast_from_main(self.seems_trained)

    def seems_trained(self) -> bool:
        """Return `is_trained` as this process sees the folder, also before the ranks are connected."""
        ended = self.stopped_early or self.out_of_time
        ended = ended or self.record.get("trained_steps") == self.config.train.max_steps
        return bool(ended) and self.adapter.is_dir()

    @property
    def stopped_early(self) -> int | None:
        """Step after which early stopping ended training. None if it did not, or if the patience is now higher or 0."""
        stopped, patience = self.record.get("stopped_early"), self.config.monitor.early_stopping
        return stopped["step"] if stopped and 0 < patience <= stopped["passes"] else None

    @property
    def out_of_time(self) -> int | None:
        """Step after which `hours` ended training. None if they did not, or if the run may now take longer."""
        ended, hours = self.record.get("out_of_time"), self.config.hours
        return ended["step"] if ended and hours and hours <= ended["hours"] else None

    @property
    def seconds_worked(self) -> float:
        """Seconds that the run's processes have worked, without the time between stop and resume."""
        return self._worked_before + self.seconds_open

    @property
    def seconds_open(self) -> float:
        """Seconds since this process opened the run."""
        return self.clock() - self._opened

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
        if not self.is_resumed:
            for path in [self.folder / name for name in _ENTRIES] if distributed.is_main() else ():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        else:
            before = self.record["policy"]
            for name in ("base_model", "revision", "fingerprint", "engine", "bits", "start_sha256"):
                if before.get(name) != policy_record.get(name):
                    raise UserError(
                        f"the run in {self.folder} began with {name} {before.get(name)!r}, now it is "
                        f"{policy_record[name]!r}; restore it, or pass another --output-dir"
                    )
        self.begun = True
        self.record.pop("error", None)  # of the attempt that is now resumed
        self.update(status="running", policy=policy_record, processes=distributed.world_size())
        distributed.barrier()

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
        kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
        if self.metrics.exists():
            atomic.write_text(self.metrics, json_files.dump_lines(kept))

    def finish(self, results: dict[str, Any]) -> None:
        """Mark the run complete."""
        self.update(status="complete", ended=now(), results=results)


def check_resume(folder: Path) -> None:
    """Raise a UserError if a folder has no run to resume. A run that was killed during its start counts, at step 0."""
    if (folder / "run.json").is_file() or (folder / ".lock").is_file():
        return
    runs = [path.parent.name for path in folder.parent.glob("*/run.json")]
    hint = suggestion(folder.name, runs, otherwise="leave out --resume to start one")
    raise UserError(f"--resume: there is no run in {folder}; {hint}")


def check_settings(config: RunConfig) -> None:
    """Raise a UserError if the output folder contains a run with settings that `--resume` may not change."""
    folder = config.folder
    if not (folder / "run.json").is_file():
        return
    record = read_record(folder)
    before_steps, max_steps = record["config"]["train"]["max_steps"], config.train.max_steps
    if max_steps < (done := newest_step(folder / "checkpoints")):
        raise UserError(f"the run in {folder} is at step {done}; pass --train.max-steps {done} or more, {_ELSEWHERE}")
    if before_steps != max_steps and not config.train.lr_scheduler.startswith("constant"):
        raise UserError(
            f"--train.max-steps {max_steps} cannot follow {before_steps}: the {config.train.lr_scheduler} schedule "
            "spans the whole run; pass another --output-dir"
        )
    # A setting that did not exist when the run was started had its default.
    before, after = flat(RunConfig().to_dict()) | flat(record["config"]), flat(config.to_dict())
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        same = old == new
        if name in ("data.task", "data.eval_task") and str(old).endswith(".py"):
            # The folder of a task file may change. Its digest is compared when the run is opened.
            same = Path(str(old)).name == Path(str(new)).name
        if name not in _MAY_CHANGE and not same:
            raise UserError(
                f"the run in {folder} has {name}={old!r}, not {new!r}; leave it out to resume, {_ELSEWHERE}"
            )


def open_run(
    config: RunConfig,
    invocation: Invocation,
    recipe: str,
    data_record: dict[str, Any],
    entries: Mapping[str, Any] | None = None,
) -> Run:
    """Create the folder of a run, or resume the run in it.

    Args:
        data_record: the entry `data` of run.json.
        entries: further entries, such as `user_files`.

    Raises:
        UserError: the folder contains a run and neither flag is set, or it contains other files; the settings of a
            resumed run differ; or another process uses the folder.
    """
    folder = config.folder
    is_run = (folder / "run.json").is_file()
    if is_run and not (invocation.resume or invocation.overwrite):
        raise UserError(f"{folder} contains a run; pass --resume to continue, --overwrite to delete it, {_ELSEWHERE}")
    # Without a run.json, no file here belongs to a run, not even a folder named `adapter`: `begin` deletes the old
    # run.json last and writes the new one first. A kill in between leaves only temporary dot files, and the empty
    # folder that the trainer makes for its checkpoints.
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    left = [path for path in paths if path.name == "checkpoints" and path.is_dir() and not any(path.iterdir())]
    foreign = [path.name for path in paths if not path.name.startswith(".") and path not in left]
    if not is_run and foreign:
        raise UserError(f"{folder} contains other files ({', '.join(foreign[:3])}); pass an empty or new --output-dir")
    if distributed.is_main():
        lock.claim(folder)
    if invocation.resume and is_run:
        record = read_record(folder)
        check_settings(config)
        _check_files(folder, record, data_record, (entries or {}).get("user_files", {}))
        before, isolation = record["data"].get("sandbox"), data_record.get("sandbox")
        if before and isolation and isolation not in before:
            record["data"]["sandbox"] = f"{before}; resumed with {isolation}"
        record["resumed"] = [*record.get("resumed", []), now()]
    else:
        if invocation.resume:
            console.note(f"nothing to resume in {folder}: the run starts at step 0")
        record = {
            "lora_grpo_run": 1,
            "recipe": recipe,
            "started": now(),
            "command": own_command(),
            "data": data_record,
            "versions": versions(),
            "git_revision": git_revision(),
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        }
    run = Run(config, {**record, "config": config.to_dict(), **(entries or {})})
    _opened[:] = [run]
    return run


def close_run(status: str, error: str | None = None) -> None:
    """Record in run.json that the open run of this process ended as `failed` or `interrupted`, and why.

    If the run has not begun, leave its folder as it was.
    """
    run = _opened.pop() if _opened else None
    if run and run.begun and run.record["status"] != "complete":
        # If it cannot be written, the status remains `running`, which readers show as killed.
        with contextlib.suppress(disk.DiskFullError, OSError):
            run.update(status=status, ended=now(), error=error)
    elif run and not run.begun and distributed.is_main():
        with contextlib.suppress(OSError):  # not empty: it existed before
            run.checkpoints.rmdir()
        if not (run.folder / "run.json").exists():
            (run.folder / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                run.folder.rmdir()


def leave_run() -> None:
    """Forget the open run, which is complete, so that this process can open another one."""
    _opened.clear()


def begun_run() -> Run | None:
    """Return the open run of this process if its run.json is written, else None."""
    return _opened[0] if _opened and _opened[0].begun else None


def _check_files(
    folder: Path, record: Mapping[str, Any], data_record: Mapping[str, Any], user_files: Mapping[str, str]
) -> None:
    """Raise a UserError if rows or Python files have changed since the run began. Print which packages have."""
    before, now = record["data"], data_record
    changed = [split for split in ("train", "eval") if before[split]["sha256"] != now[split]["sha256"]]
    changed += [task for task, digest in now.get("also", {}).items() if before["also"][task] != digest]
    if changed:
        raise UserError(
            f"the {changed[0]} rows have changed since the run in {folder} began; restore the file, {_ELSEWHERE}"
        )
    for path, digest in user_files.items():
        if digest not in record.get("user_files", {}).values():
            raise UserError(f"{path} has changed since the run in {folder} began; restore it, {_ELSEWHERE}")
    installed = versions()
    changed = [
        f"{name} {old} -> {installed.get(name)}"
        for name, old in record["versions"].items()
        if installed.get(name) != old
    ]
    if changed:
        console.note(f"versions changed since the run began: {', '.join(changed)}")


_opened: list[Run] = []
"""The open run of this process, for `close_run`."""
