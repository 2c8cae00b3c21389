"""One row of a GPU check: runs the recipe as a command, with one model, engine and sampling backend."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.planning import measured_command
from lora_grpo.planning.random_model import build_command
from lora_grpo.runs import read_metrics

ENGINES, BACKENDS = ("peft", "unsloth"), ("vllm", "transformers")
PROBLEMS = ("--data.task", "starter", "--data.train-limit", "64", "--data.few-shot", "6", "--data.eval-limit", "1")
"""Generated problems. With six examples, prompts have about 440 tokens, close to the 512 of the memory plan."""
_STEPS = {"vllm": 3, "transformers": 2}
"""Steps of a row. The first step is a warm-up; it is measured only if there is no other step."""
_ROW_SHARE = 1 / 3  # of the check's time, at most
_REWARDS = ("correct_answer=2.0", "soft_xml_format=0.5", "pattern:x77[01][0-9][0-9]=1.0")
"""Random tokens earn none of the first two, and equal rewards have no gradient. About half of the completions with 512
tokens contain one of the pattern's 200 (of 151,936) tokens."""


@dataclass(frozen=True)
class Row:
    model: str
    """Name of the shape, e.g. `0.5B`."""
    config: dict[str, Any]
    """config.json of the random model."""
    engine: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.engine}-{self.backend}"

    @property
    def missing_packages(self) -> list[str]:
        needed = [name for name in ("unsloth", "vllm") if name in (self.engine, self.backend)]
        return [name for name in needed if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class CheckSettings:
    """Settings of all rows."""

    recipe: Path
    output: Path
    seconds: float
    """Time limit of the whole check."""
    arguments: tuple[str, ...] = ("--rewards", *_REWARDS)
    """Additional arguments of the recipe."""


def run_row(row: Row, settings: CheckSettings, folder: Path, deadline: float) -> dict[str, Any]:
    """Build the row's model in `folder` if an earlier row has not, and run the recipe until `deadline`.

    Returns:
        `status` (ran, skipped or failed), `reason`, and for a row that was started `log` and the measurements.
    """
    if missing := row.missing_packages:
        return _result("skipped", f"{' and '.join(missing)} not installed")
    if time.monotonic() > deadline:
        return _result("skipped", "no time left")
    model, logs = folder / row.model, settings.output / "logs"
    if not model.exists():
        command = build_command(model, row.config)
        built = measured_command.run(command, logs / f"build-{row.model}.log", deadline - time.monotonic())
        if built.exit_code is None:
            return _result("skipped", "no time left")
        if built.exit_code:
            shutil.rmtree(model, ignore_errors=True)
            return _result("failed", f"the random model was not built: {built.message}")
    log, run = logs / f"{row.name}.log", folder / row.name
    command = [
        *(sys.executable, str(settings.recipe), "--output-dir", str(run), "--model.name", str(model)),
        *("--model.engine", row.engine, "--sampling.backend", row.backend),
        *("--train.max-steps", str(_STEPS[row.backend]), "--eval.num-samples", "0", *PROBLEMS, *settings.arguments),
    ]
    limit = settings.seconds * _ROW_SHARE
    left = deadline - time.monotonic()
    done = measured_command.run(command, log, min(limit, left))
    found = {"seconds": round(done.seconds, 1), "log": str(log), "gpu_peak_gib": done.gpu_peak_gib}
    steps = [line for line in read_metrics(run) if "step_time" in line]
    if steps:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        found |= _measurements(record, steps)
    shutil.rmtree(run, ignore_errors=True)
    if done.exit_code is None and steps:
        return found | _result("ran", f"stopped after {done.seconds:.0f} s")
    if done.exit_code is None:
        status = "failed" if limit < left else "skipped"
        return found | _result(status, f"no step within {done.seconds:.0f} s; last: {done.message}")
    if done.exit_code == UserError.exit_code and " does not fit on " in done.message:  # rejected by the memory plan
        return found | _result("skipped", done.message.removeprefix("error: ").partition(";")[0])
    if done.exit_code:
        return found | _result("failed", f"{done.message} ({log})")
    if not any(step["grad_norm"] for step in steps):
        return found | _result("failed", f"no step had a gradient ({log})")
    return found | _result("ran", None)


def _result(status: str, reason: str | None) -> dict[str, Any]:
    return {"status": status, "reason": reason}


def _measurements(record: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speed of a row, the median of its steps after the first, and its memory."""
    config, memory = record["config"], record.get("memory") or {}

    def median(name: str) -> float:
        return round(statistics.median(step[name] for step in steps[1:] or steps), 3)

    return {
        "steps": len(steps),
        "bits": config["model"]["bits"],
        "micro_batch_size": memory.get("micro_batch_size", config["train"]["micro_batch_size"]),
        "completion_tokens": steps[-1]["completions/mean_length"],
        "step_seconds": median("step_time"),
        "rollout_seconds": median("time/rollouts"),
        "reward_seconds": median("time/rewards"),
        "training_seconds": median("time/training"),
        "tokens_per_second": median("rollouts/tokens_per_second"),
        "torch_peak_gib": record.get("peak_gpu_memory_gib"),
        "planned_gib": max(memory.get("planned_phases_gib", {}).values(), default=None),
        "logprob_check": record.get("logprob_check"),
    }
