"""How much of the card's memory is in use, as nvidia-smi sees it: with CUDA's context and all that is not torch's."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading

_SECONDS = 0.25
"""Between two looks; a peak between them is missed."""


def used_gib() -> float | None:
    """Return the memory in use on the card that CUDA sees first, or None where nvidia-smi does not tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    which = [] if first.startswith("MIG-") else ["-i", first]
    query = [tool, *which, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.split()
    return int(lines[0]) / 1024 if lines and lines[0].isdigit() else None


class MemoryWatch:
    """While it is entered, looks how far the card's memory in use rises above what it was."""

    peak_gib: float | None = None
    """The most above the start; None where nvidia-smi did not tell."""

    def __enter__(self) -> MemoryWatch:
        self._ended = threading.Event()
        self._before = used_gib()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while self._before is not None:
            now = used_gib()
            if now is not None:
                self.peak_gib = round(max(self.peak_gib or 0.0, now - self._before), 2)
            if self._ended.wait(_SECONDS):
                return
