"""The engine and sampling backend that `check-gpu` measured as the fastest, which new runs use for `auto`."""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Literal

from lora_grpo import console
from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic, json_files
from lora_grpo.hardware.machine import supports_unsloth, uses_gpu


@dataclass(frozen=True)
class MeasuredEngine:
    """The fastest engine and sampling backend that `check-gpu` measured."""

    engine: Literal["peft", "unsloth"]
    backend: Literal["transformers", "vllm"]
    date: str
    machine: dict[str, str]
    """Name of the GPU and versions of the packages, for which the measurement is valid."""


def _machine(gpu: str) -> dict[str, str]:
    found = {"gpu": gpu}
    for name in ("torch", "unsloth", "vllm", "trl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _measured_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lora_grpo" / "check-gpu.json"


def save_measured_engine(
    engine: Literal["peft", "unsloth"], backend: Literal["transformers", "vllm"], gpu: str
) -> Path:
    """Save the fastest engine and backend for this user's runs on a GPU with this name, and return the file."""
    path, found = _measured_file(), MeasuredEngine(engine, backend, date.today().isoformat(), _machine(gpu))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, dataclasses.asdict(found))
    return path


def measured_engine(config: RunConfig, gpu: str) -> MeasuredEngine | None:
    """Return what was measured with this GPU and the installed packages; None without such a measurement.

    None too if the run names an engine or a backend, or needs what Unsloth or vLLM does not support. A damaged file is
    ignored with a line on stderr.
    """
    is_open = config.model.engine == config.sampling.backend == "auto"
    if not is_open or config.lora.dora or not supports_unsloth(config) or not uses_gpu(config):
        return None
    try:
        path = _measured_file()
        if not path.exists():
            return None
        value = json_files.read_object(path)
        found: MeasuredEngine = json_files.validated(value, MeasuredEngine, f"{path} is damaged", "run check-gpu again")
    except (OSError, RuntimeError, UserError) as error:  # RuntimeError: no home folder, or deep nesting
        console.note(f"note: ignoring the measurements of check-gpu: {first_line(error)}")
        return None
    return found if found.machine == _machine(gpu) else None
