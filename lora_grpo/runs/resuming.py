"""What may differ when a run is resumed: some settings. Not its rows, the user's code or its other settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.config import Invocation, RunConfig, field_of_micro_batches
from lora_grpo.errors import UserError
from lora_grpo.runs.checkpoints import newest_step
from lora_grpo.runs.reader import flatten, read_record, similar_run, versions

OR_ELSEWHERE = "or pass another --output-dir"
"""The end of error messages about a folder that already contains a run."""

_MAY_CHANGE = frozenset(
    {
        "output_dir",
        "hours",
        "model.gpu_memory_share",
        "sandbox.workers",
        "train.max_steps",
        "train.micro_batch_size",
        "train.checkpoint_steps",
        "train.gradient_checkpointing",
        "train.keep_checkpoints",
        "train.report_to",
        "sampling.server_url",
        "sampling.server_folder",
        "sampling.engine_sleep",
        "monitor.stop_on",
        "monitor.early_stopping",
    }
)
"""Settings that a resumed run may change. They do not affect training, except that the micro-batch changes rounding,
and with some fields of `--grpo` more; see `may_change`."""

_TASKS = ("data.task", "data.eval_task")
"""Settings that may name a task file."""


def may_change(name: str, config: RunConfig) -> bool:
    """Return whether a resumed run with a configuration may change a setting, by its dotted name."""
    if name == "train.micro_batch_size" and field_of_micro_batches(config.grpo):
        return False
    return name in _MAY_CHANGE


def resumes(folder: Path, invocation: Invocation) -> bool:
    """Return whether a command goes on with the run in a folder. One that was killed before it began starts anew."""
    return invocation.resume and (folder / "run.json").is_file()


def check_resume(folder: Path) -> None:
    """Raise a UserError if a folder has no run to resume. A run that was killed during its start counts, at step 0."""
    if (folder / "run.json").is_file() or (folder / ".lock").is_file():
        return
    hint = similar_run(folder, otherwise="leave out --resume to start one")
    raise UserError(f"--resume: there is no run in {folder}; {hint}")


def check_settings(config: RunConfig) -> None:
    """Raise a UserError if the output folder contains a run with settings that `--resume` may not change."""
    folder = config.folder
    if not (folder / "run.json").is_file():
        return
    record = read_record(folder)

    # The number of steps may grow, unless the learning rate of every step depends on it.
    steps_before = record["config"]["train"]["max_steps"]
    steps_now = config.train.max_steps
    steps_done = newest_step(folder / "checkpoints")
    if steps_now < steps_done:
        raise UserError(
            f"the run in {folder} is at step {steps_done}; pass --train.max-steps {steps_done} or more, {OR_ELSEWHERE}"
        )
    if steps_before != steps_now and config.train.schedule_spans_run:
        raise UserError(
            f"--train.max-steps {steps_now} cannot follow {steps_before}: the {config.train.lr_scheduler} schedule "
            "spans the whole run; pass another --output-dir"
        )

    # A setting that did not exist when the run was started had its default.
    settings_before = flatten(RunConfig().to_dict()) | flatten(record["config"])
    settings_now = flatten(config.to_dict())
    for name in sorted(settings_before.keys() | settings_now.keys()):
        before = settings_before.get(name)
        now = settings_now.get(name)
        if not may_change(name, config) and not _is_same_setting(name, before, now):
            raise UserError(
                f"the run in {folder} has {name}={before!r}, not {now!r}; leave it out to resume, {OR_ELSEWHERE}"
            )


def _is_same_setting(name: str, before: Any, now: Any) -> bool:
    if name in _TASKS and str(before).endswith(".py"):
        # The folder of a task file may change. Its digest is compared when the run is opened.
        return Path(str(before)).name == Path(str(now)).name
    return bool(before == now)


def check_inputs(
    folder: Path,
    record: Mapping[str, Any],
    data_record: Mapping[str, Any],
    user_files: Mapping[str, str],
    python_objects: Mapping[str, Mapping[str, str | None]],
) -> None:
    """Raise a UserError if rows or the user's code have changed since a run began. Print which packages have.

    Args:
        folder: of the run, for messages.
        record: run.json as the run was left.
        data_record: the entry `data` of run.json as it would be now.
        user_files: SHA-256 of the user's Python files by path, as they are now.
        python_objects: the same entry of run.json, as it would be now.
    """
    data_before = record["data"]
    changed: list[str] = []  # splits, and tasks of --eval.also
    for split in ("train", "eval"):
        if data_before[split]["sha256"] != data_record[split]["sha256"]:
            changed.append(split)
    for task, digest in data_record.get("also", {}).items():
        if data_before["also"][task] != digest:
            changed.append(task)
    if changed:
        raise UserError(
            f"the {changed[0]} rows have changed since the run in {folder} began; restore the file, {OR_ELSEWHERE}"
        )

    # Compared by digest alone, because a file may be in another folder now.
    digests_before = record.get("user_files", {}).values()
    for path, digest in user_files.items():
        if digest not in digests_before:
            raise UserError(f"{path} has changed since the run in {folder} began; restore it, {OR_ELSEWHERE}")
    objects_before = record.get("python_objects", {})
    for name, description in python_objects.items():
        digests = {description["sha256"], objects_before.get(name, {}).get("sha256")} - {None}  # None: unknown
        if len(digests) > 1:
            raise UserError(f"{name} has changed since the run in {folder} began; restore it, {OR_ELSEWHERE}")

    installed = versions()
    changed_versions = []
    for name, before in record["versions"].items():
        if installed.get(name) != before:
            changed_versions.append(f"{name} {before} -> {installed.get(name)}")
    if changed_versions:
        console.note(f"versions changed since the run began: {', '.join(changed_versions)}")
