"""A command that has so much time and no more, with a log, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def run(command: list[str], log: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command and whatever it starts, for so long and no longer.

    Returns:
        Its exit code, None where its time ran out; and the line of its log that says most.
    """
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
            code: int | None = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, _last_words(log.read_text(encoding="utf-8", errors="replace"))


def _last_words(text: str) -> str:
    """Return the error that a log ends in, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[-30:] if line.startswith("error: ")]
    return (errors or lines or ["nothing was said"])[-1][:300]
