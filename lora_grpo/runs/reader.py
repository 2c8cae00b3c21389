"""run.json: its schema and the versions in it. Reads the folder of a run in any state: complete, running, killed."""

import contextlib
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lora_grpo import __version__
from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.files import json_files, lock

_PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate", "unsloth", "vllm")

Line = dict[str, Any]
Entry = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class RunRecord:
    """The entries of run.json that are validated. The file has other entries, which are informational."""

    lora_grpo_run: Literal[1]
    """Version of this schema."""
    config: RunConfig
    data: dict[str, str | int | Entry | list[str] | None]
    """Tasks, `train` and `eval` rows (source, number, SHA-256), `system_prompt` of all training prompts, and `sandbox`,
    the isolation of programs."""
    policy: dict[str, str | int | float | bool | dict[str, Any] | None]
    """Base model with `revision` or `fingerprint`, engine, bits, device, variables of the chat template,
    `start_sha256`, of the adapter at the start, and `teacher_sha256` and `teacher_revision`."""
    versions: dict[str, str]
    recipe: str | None = None
    status: Literal["running", "complete", "interrupted", "failed"] | None = None
    trained_steps: int | None = None
    """The step of the adapter in adapter/; None until training is finished."""
    start: Entry | None = None
    """The adapter that the run started from: its `name`, and `run`, the path of its run relative to this one."""
    teacher: dict[str, str | int | bool | None] | None = None
    """The teacher: its `name` and `kind`, `has_adapter` and `has_own_prompt`; `base_model`, `revision` and `bits` if it
    has a base of its own."""
    alarms: tuple[Entry, ...] = ()
    """Each with `step`, `name`, `message` and `stopped`: whether it stopped the run."""
    best: dict[str, float | None] | None = None
    """`step`, `reward` and `accuracy` of the validation of the adapter in best/."""
    stopped_early: dict[str, int] | None = None
    """`step`, and `passes`, the validation passes since the best one, if early stopping ended training."""
    out_of_time: dict[str, float] | None = None
    """`step` and `hours`, if `--hours` ended training."""
    evaluation_seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the evaluations, `base` and `trained`, on rank 0."""
    seconds_worked: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    resumed: tuple[str, ...] = ()
    """When the run was resumed, in UTC."""
    command: tuple[str, ...] = ()
    """The command that started the run."""
    machine: dict[str, Any] = field(default_factory=dict)
    changed_settings: dict[str, Any] | None = None
    """The preset's value of each setting that the run changed."""
    user_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the user's task file, reward files and the modules beside them that they import, by path."""
    python_objects: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """`module` and `sha256` of the source of each object that Python code gave in place of a name."""


def read_record(folder: Path) -> dict[str, Any]:
    """Read the run.json in the folder of a run, or raise a UserError if it does not match `RunRecord`."""
    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; {similar_run(folder, otherwise='give the folder of a run')}")
    record = json_files.read_object(path)
    json_files.validated(record, RunRecord, f"{path} is not a valid run.json", "restore it from a copy")
    return record


def similar_run(folder: Path, otherwise: str) -> str:
    """Return what may be meant by a folder that has no run: "did you mean 'gsm8k_lora'?", else `otherwise`."""
    runs = [path.parent.name for path in folder.parent.glob("*/run.json")]
    return suggestion(folder.name, runs, otherwise=otherwise)


def planned_settings(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that were open and that the plan chose, from run.json."""
    names: list[str] = (record.get("memory") or {}).get("derived", [])
    return names


def system_prompt(record: Mapping[str, Any]) -> str | None:
    """Return the system prompt that a run was trained with, from its run.json; None if there is none."""
    return record.get("data", {}).get("system_prompt")


def now() -> str:
    """Return the current UTC time in ISO format, with a precision of one second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, this package, and its main dependencies that are installed."""
    installed = {"python": platform.python_version(), "lora_grpo": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_revision() -> str | None:
    """Return the commit of this package's git checkout, with `+changes` if tracked files are modified."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


@dataclass(frozen=True)
class RunFiles:
    """The files of a run."""

    folder: Path
    record: dict[str, Any]
    """run.json."""
    metrics: list[Line]
    """metrics.jsonl, by step."""
    completions: list[Line]
    """completions/, by step."""
    validation: list[Line]
    """validation/, by step; step 0 is the base."""
    samples: dict[str, list[Line]]
    """Samples of the evaluation set, by model: `base`, `trained`."""
    rows: dict[str, Line]
    """`question` and `answer` of the evaluation set, by `task_id`."""
    is_running: bool
    """Whether a process holds the folder's lock."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """`complete`, `running`, `killed`, `interrupted` or `failed`."""
        status = str(self.record.get("status", "running"))
        if status == "running" and not self.is_running:
            return "killed"
        return status

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run, or raise a UserError if it is not one or a file is damaged."""
    is_running = lock.is_held(folder)  # before reading, in case the run ends in the meantime
    samples = {}
    for path in sorted((folder / "evaluation").glob("*.samples.jsonl")):
        model = path.name.removesuffix(".samples.jsonl")
        samples[model] = json_files.read_finished_lines(path, task_id=str, completion=str, passed=bool)
    rows = json_files.read_finished_lines(folder / "evaluation" / "rows.jsonl", task_id=str)
    return RunFiles(
        folder=folder,
        record=read_record(folder),
        metrics=read_metrics(folder),
        completions=_read_steps(folder / "completions"),
        validation=_read_steps(folder / "validation"),
        samples=samples,
        rows={row["task_id"]: row for row in rows},
        is_running=is_running,
    )


def _read_steps(folder: Path) -> list[Line]:
    """Return the lines of the files `step-00001.jsonl`, `step-00002.jsonl`, ... in a folder, by step."""
    lines: list[Line] = []
    for path in sorted(folder.glob("step-*.jsonl")):
        lines += json_files.read_finished_lines(path, step=int, completion=str, rewards=dict)
    return sorted(lines, key=lambda line: line["step"])


def last_completions(folder: Path, num_steps: int) -> Iterator[Line]:
    """Yield the logged completions of the last steps of a run, or raise a UserError if a line is damaged."""
    for path in sorted((folder / "completions").glob("step-*.jsonl"))[-num_steps:]:
        for _, row in json_files.read_lines(path, "completions"):
            yield row


def read_metrics(folder: Path) -> list[Line]:
    """Return the complete lines of a run's metrics.jsonl, one per step, or raise a UserError if one is damaged."""
    lines = json_files.read_finished_lines(folder / "metrics.jsonl", step=int)
    return sorted(lines, key=lambda line: line["step"])


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, as used in flags and messages."""
    by_dotted_name: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            by_dotted_name |= flatten(value, f"{prefix}{name}.")
        else:
            by_dotted_name[prefix + name] = value
    return by_dotted_name
