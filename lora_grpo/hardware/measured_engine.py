"""The engine and sampling backend that `check-gpu` measured as the fastest, which new runs use for `auto`.

Every plan and every run that uses the measurement prints one line with the choice, its date and this file
(memory/show.py).
"""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Literal

from lora_grpo import console
from lora_grpo.config import ResolvedBackend, RunConfig
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic, json_files
from lora_grpo.hardware.machine import supports_unsloth, uses_gpu

_PACKAGES = ("torch", "unsloth", "vllm", "trl")
"""Packages whose versions a measurement is valid for."""


@dataclass(frozen=True)
class MeasuredEngine:
    """The fastest engine and sampling backend that `check-gpu` measured."""

    engine: Literal["peft", "unsloth"]
    backend: ResolvedBackend
    date: str
    """Day of the measurement, e.g. 2026-11-28."""
    machine: dict[str, str]
    """Name of the GPU and versions of the packages, for which the measurement is valid."""


def measured_engine_file() -> Path:
    """Return the file of the measurement, in this user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "lora_grpo" / "check-gpu.json"


def save_measured_engine(engine: Literal["peft", "unsloth"], backend: ResolvedBackend, gpu: str) -> Path:
    """Save the fastest engine and backend for this user's runs on a GPU with this name, and return the file."""
    path = measured_engine_file()
    measured = MeasuredEngine(engine, backend, date.today().isoformat(), _describe_machine(gpu))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, dataclasses.asdict(measured))
    return path


def measured_engine(config: RunConfig, gpu: str) -> MeasuredEngine | None:
    """Return what was measured with this GPU and the installed packages; None without such a measurement.

    None too if the run names an engine or a backend, or needs what Unsloth or vLLM does not support. A damaged file is
    ignored with a line on stderr.
    """
    names_none = config.model.engine == "auto" and config.sampling.backend == "auto"
    if not names_none or config.lora.dora or not supports_unsloth(config) or not uses_gpu(config):
        return None
    try:
        path = measured_engine_file()
        if not path.exists():
            return None
        values = json_files.read_object(path)
        measured: MeasuredEngine = json_files.validated(
            values, MeasuredEngine, f"{path} is damaged", "run check-gpu again"
        )
    except (OSError, RuntimeError, UserError) as error:  # RuntimeError: no home folder, or deep nesting
        console.note(f"note: ignoring the measurements of check-gpu: {first_line(error)}")
        return None
    is_valid = measured.machine == _describe_machine(gpu)
    return measured if is_valid else None


def _describe_machine(gpu: str) -> dict[str, str]:
    description = {"gpu": gpu}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            description[name] = metadata.version(name)
    return description
