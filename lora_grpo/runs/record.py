"""The schema of run.json, reading it, and the versions that it records."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lora_grpo import __version__
from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import json_files

_PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate", "unsloth", "vllm")


@dataclass(frozen=True)
class RowsRecord:
    """Training or evaluation rows."""

    source: str | None = None
    """File or Hub id; None for the task's own data."""
    rows: int | None = None
    sha256: str | None = None
    """SHA-256 of the rows' content, in order."""


@dataclass(frozen=True)
class DataRecord:
    """The data of a run."""

    task: str | None = None
    eval_task: str | None = None
    train: RowsRecord = RowsRecord()
    eval: RowsRecord = RowsRecord()
    system_prompt: str | None = None
    """System message of all training prompts; None if they differ."""
    trained_on_benchmark: str | None = None
    """Name of the benchmark if the run trained on its test problems."""
    left_out_as_trained_on: int = 0
    """Number of evaluation rows left out because the run trained on them."""
    sandbox: str | None = None
    """How programs were isolated; None if no programs were run."""


@dataclass(frozen=True)
class PolicyRecord:
    """The base model and the engine."""

    base_model: str | None = None
    revision: str | None = None
    """Hub commit."""
    fingerprint: str | None = None
    """SHA-256 of the base model's safetensors files; None for a Hub model."""
    engine: str | None = None
    bits: int | None = None
    device: str | None = None
    trust_remote_code: bool | None = None
    start_sha256: str | None = None
    """SHA-256 of the adapter that the run started from; None for a new one."""


@dataclass(frozen=True)
class StartRecord:
    """The adapter that the run started from."""

    name: str
    """Name of its folder, or of the run that trained it."""
    run: str | None = None
    """That run, relative to this run's folder."""


@dataclass(frozen=True)
class AlarmRecord:
    """An alarm of the training."""

    step: int
    name: str
    message: str
    stopped: bool = False
    """Whether it stopped the run."""


@dataclass(frozen=True)
class BestRecord:
    """The step of the adapter in best/, with its validation pass."""

    step: int
    reward: float
    accuracy: float | None = None


@dataclass(frozen=True)
class OutOfTimeRecord:
    """`--hours` ended training."""

    step: int
    hours: float


@dataclass(frozen=True)
class TimeRecord:
    """What `--hours` decided."""

    eval_rows: int | None = None
    """Number of rows of both evaluations if some were left out."""


@dataclass(frozen=True)
class RunRecord:
    """The entries of run.json that are validated. The file has other entries, which are informational."""

    lora_grpo_run: Literal[1]
    """Version of this schema."""
    config: RunConfig
    data: DataRecord
    policy: PolicyRecord
    versions: dict[str, str]
    recipe: str | None = None
    status: Literal["running", "complete", "interrupted", "failed"] | None = None
    trained_steps: int | None = None
    start: StartRecord | None = None
    alarms: tuple[AlarmRecord, ...] = ()
    best: BestRecord | None = None
    stopped_early: dict[str, int] | None = None
    out_of_time: OutOfTimeRecord | None = None
    evaluation_seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the evaluations, `base` and `trained`, on rank 0."""
    time_budget: TimeRecord | None = None
    seconds_worked: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    resumed: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    machine: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    changed_settings: dict[str, Any] | None = None
    """The preset's value of each setting that the run changed."""
    user_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the user's task file, reward files and the modules beside them that they import, by path."""


def read_record(folder: Path) -> dict[str, Any]:
    """Read the run.json in the folder of a run, or raise a UserError if it does not match `RunRecord`."""
    path = folder / "run.json"
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run")
    record = json_files.read_object(path)
    json_files.validated(record, RunRecord, f"{path} is not a valid run.json", "restore it from a copy")
    return record


def system_prompt(record: Mapping[str, Any]) -> str | None:
    """Return the system prompt that a run was trained with, from its run.json; None if there is none."""
    return record.get("data", {}).get("system_prompt")


def now() -> str:
    """Return the current UTC time in ISO format, with a precision of one second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, this package, and its main dependencies that are installed."""
    found = {"python": platform.python_version(), "lora_grpo": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Return the commit of this package's git checkout, with `+changes` if tracked files are modified."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, as used in flags and messages."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return found
