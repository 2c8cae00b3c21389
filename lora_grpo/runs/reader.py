"""Read the folder of a run, whether it is complete, running, interrupted, failed or killed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import json_files, lock
from lora_grpo.runs.record import read_record

Line = dict[str, Any]


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
    """`question` and `answer` of the evaluation set, by task_id."""
    is_running: bool
    """Whether a process holds the folder's lock."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """`complete`, `running`, `killed`, `interrupted` or `failed`."""
        status = str(self.record.get("status", "running"))
        return "killed" if status == "running" and not self.is_running else status

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_run(folder: Path) -> RunFiles:
    """Read the folder of a run, or raise a UserError if it is not one or a file is damaged."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run, e.g. outputs/gsm8k_lora")

    lines, evaluation = json_files.read_finished_lines, folder / "evaluation"

    def by_step(name: str) -> list[Line]:
        paths = sorted((folder / name).glob("step-*.jsonl"))
        found = [line for path in paths for line in lines(path, step=int, completion=str, rewards=dict)]
        return sorted(found, key=lambda line: line["step"])

    return RunFiles(
        folder=folder,
        is_running=lock.is_held(folder),  # before reading, in case the run ends in the meantime
        record=read_record(folder),
        metrics=read_metrics(folder),
        completions=by_step("completions"),
        validation=by_step("validation"),
        samples={
            path.name.removesuffix(".samples.jsonl"): lines(path, task_id=str, completion=str, passed=bool)
            for path in sorted(evaluation.glob("*.samples.jsonl"))
        },
        rows={row["task_id"]: row for row in lines(evaluation / "rows.jsonl", task_id=str)},
    )


def read_metrics(folder: Path) -> list[Line]:
    """Return the complete lines of a run's metrics.jsonl, one per step, or raise a UserError if one is damaged."""
    return sorted(json_files.read_finished_lines(folder / "metrics.jsonl", step=int), key=lambda line: line["step"])
