"""What is in a run's folder: of one that is complete, that still goes on, that failed or was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import lock
from lora_grpo.runs.record import read_record

Line = dict[str, Any]
_TYPES: dict[str, type] = {
    "step": int, "completion": str, "rewards": dict, "task_id": str, "passed": bool
}  # fmt: skip
"""Of the entries that a line must have."""


@dataclass(frozen=True)
class RunFiles:
    """A run as its files tell it."""

    folder: Path
    record: dict[str, Any]
    """run.json."""
    metrics: list[Line]
    """Lines of metrics.jsonl, by step."""
    completions: list[Line]
    """Lines of completions/, by step."""
    validation: list[Line]
    """Lines of validation/, by step; step 0 is the base."""
    samples: dict[str, list[Line]]
    """Samples of the held-out rows, by what drew them: `base`, `trained`."""
    rows: dict[str, Line]
    """`question` and `answer` of the held-out rows, by task_id; empty in runs of versions that did not keep them."""
    is_worked_on: bool
    """Whether a process holds the folder."""
    remarks: list[str]
    """What could not be read, in sentences."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """`complete`, `running`, `killed`, `interrupted` or `failed`."""
        status = str(self.record.get("status", "running"))
        return "killed" if status == "running" and not self.is_worked_on else status

    @property
    def steps(self) -> int:
        """Steps that were trained."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder.

    Raises:
        UserError: it is not a run's folder, or a line in the middle of a file is not what it should be; a last line
            that was being written is left out.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run, e.g. outputs/gsm8k_lora")
    worked_on = lock.is_held(folder)  # first: a run that ends meanwhile is a complete one
    record = read_record(folder)
    remarks: list[str] = []
    metrics = sorted(_lines(folder / "metrics.jsonl", ("step",), remarks), key=lambda line: line["step"])
    completions, validation = (_by_step(folder / name, remarks) for name in ("completions", "validation"))
    samples = {
        path.name.removesuffix(".samples.jsonl"): list(_lines(path, ("task_id", "completion", "passed"), remarks))
        for path in sorted((folder / "evaluation").glob("*.samples.jsonl"))
    }
    rows = {row["task_id"]: row for row in _lines(folder / "evaluation" / "rows.jsonl", ("task_id",), remarks)}
    return RunFiles(folder, record, metrics, completions, validation, samples, rows, worked_on, remarks)


def _by_step(folder: Path, remarks: list[str]) -> list[Line]:
    """Return the lines of completions that were written after some steps."""
    found: list[Line] = []
    for path in sorted(folder.glob("step-*.jsonl")):
        found += _lines(path, ("step", "completion", "rewards"), remarks)
    return sorted(found, key=lambda line: line["step"])


def _lines(path: Path, needed: tuple[str, ...], remarks: list[str]) -> Iterator[Line]:
    """Yield the objects of a file that may still be written to, and remark on a last line that is not whole."""
    if not path.is_file():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and all(isinstance(value.get(name), _TYPES[name]) for name in needed):
            yield value
        elif number == len(lines):  # no line feed after it: the process was writing it
            remarks.append(f"{path.name}: its last line is not whole and is left out")
        else:
            what = f"expected an object with {', '.join(needed)}, got {line[:60]!r}"
            raise UserError(f"{path}:{number}: {what}; take the line out, or resume the run")
