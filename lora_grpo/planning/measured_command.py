"""Runs a command with a time limit and a log, and measures its peak GPU memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.config import nvidia_gpus

_POLL_SECONDS = 0.25  # GPU memory peaks that are shorter can be missed


@dataclass(frozen=True)
class Outcome:
    exit_code: int | None
    """None if the command was killed at its time limit."""
    message: str
    """The error at the end of the log, else its last line."""
    seconds: float
    gpu_peak_gib: float | None
    """Highest increase of used GPU memory since the start, as reported by nvidia-smi. Includes the CUDA context and
    everything outside torch's allocator. None without nvidia-smi."""


def run(command: list[str], log: Path, seconds: float) -> Outcome:
    """Run a command without network access, and kill it and its child processes at the time limit."""
    started, before, peak = time.monotonic(), _used_gib(), 0.0
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            while process.poll() is None and time.monotonic() < started + seconds:
                if before is not None:
                    peak = max(peak, (_used_gib() or 0.0) - before)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            exit_code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    message = _last_message(log.read_text(encoding="utf-8", errors="replace"))
    return Outcome(exit_code, message, time.monotonic() - started, None if before is None else round(peak, 2))


def _used_gib() -> float | None:
    gpus, _ = nvidia_gpus(refresh=True)
    return gpus[0].memory_gib - gpus[0].free_gib if gpus else None


def _last_message(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-30:] if line.startswith("error: ")]
    return (errors or lines or ["the log is empty"])[-1][:300]
