"""run.json: its schema, how it is read, and what it says of the machine and the versions."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

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
    """Number of rows."""
    sha256: str | None = None
    """Digest of the rows' content, in order."""


@dataclass(frozen=True)
class DataRecord:
    """The data of a run."""

    task: str | None = None
    eval_task: str | None = None
    train: RowsRecord = RowsRecord()
    eval: RowsRecord = RowsRecord()
    trained_on_benchmark: str | None = None
    """Benchmark whose test problems were trained on."""
    left_out_as_trained_on: int = 0
    """Evaluation rows left out because they were trained on."""
    sandbox: str | None = None
    """Isolation of the programs that were run; None if none were."""


@dataclass(frozen=True)
class PolicyRecord:
    """The base model and the engine."""

    base_model: str | None = None
    revision: str | None = None
    """Hub commit."""
    fingerprint: str | None = None
    """Digest of the base's tensors."""
    engine: str | None = None
    bits: int | None = None
    """Precision of the frozen base weights."""
    device: str | None = None
    trust_remote_code: bool | None = None


@dataclass(frozen=True)
class RunRecord:
    """What run.json must be to be read; it has further entries that only people read."""

    lora_grpo_run: Literal[1]
    """Version of this schema."""
    config: RunConfig
    data: DataRecord
    policy: PolicyRecord
    versions: dict[str, str]
    recipe: str | None = None
    status: Literal["running", "complete", "interrupted", "failed"] | None = None
    seed: int | None = None
    trained_steps: int | None = None
    reward_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of user rewards."""


def read_record(folder: Path) -> dict[str, Any]:
    """Read and validate the run.json of a run's folder.

    Raises:
        UserError: it is missing, or does not fit `RunRecord`.
    """
    from pydantic import TypeAdapter, ValidationError

    path = folder / "run.json"
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run")
    record = json_files.read_object(path)
    try:
        # As JSON, where a list is a strict tuple; an error message may quote half a surrogate pair.
        text = json.dumps(record, ensure_ascii=False).encode(errors="replace")
        TypeAdapter(RunRecord).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not a valid run.json: {where}: {first['msg']}") from None
    return record


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and every installed package that takes part."""
    found = {"python": platform.python_version(), "lora_grpo": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Return the commit of the checkout this package runs from, with `+changes` if tracked files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "-uno") else commit or None


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names, as flags and messages spell them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return found
