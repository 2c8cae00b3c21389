"""One row of a GPU check: runs the recipe as a command, with one model, engine and sampling backend."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.gpu_check import measured_command
from lora_grpo.models import Shape
from lora_grpo.planning import Limits, StepWork
from lora_grpo.runs import read_metrics

ENGINES, BACKENDS = ("peft", "unsloth"), ("vllm", "transformers")
_STEPS = {"vllm": 3, "transformers": 2}
"""Steps of a row. The first step is a warm-up; it is measured only if there is no other step."""
_ROW_SHARE = 1 / 3
"""Maximum share of the check's time for one row."""
_REWARDS = ("correct_answer=2.0", "soft_xml_format=0.5")
_COIN_REWARD = "pattern:x77[01][0-9][0-9]=1.0"
"""Random tokens earn none of the other rewards, and equal rewards have no gradient. About half of the completions with
512 tokens contain one of these 200 (of 151,936) tokens."""


@dataclass(frozen=True)
class Row:
    """One combination to check."""

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
        """Packages that this row needs but that are not installed."""
        needed = [name for name in ("unsloth", "vllm") if name in (self.engine, self.backend)]
        return [name for name in needed if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class CheckSettings:
    """The settings shared by all rows of a check."""

    recipe: Path
    """The recipe's script."""
    output: Path
    """Folder for the results."""
    seconds: float
    """Time limit of the whole check."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of the recipe, passed last."""
    coin_reward: str = _COIN_REWARD
    """A reward earned by about half of the random completions."""
    machine: dict[str, Any] = field(default_factory=dict)
    """Description of the machine for the results."""
    limits: Limits | None = None
    """Measured rates of the GPU."""


def run_row(row: Row, settings: CheckSettings, folder: Path, model: Path, deadline: float) -> dict[str, Any]:
    """Run the recipe for one row and return the result.

    Args:
        row: the combination.
        settings: settings of the check.
        folder: folder with the problems. The run folder is created in it and deleted afterwards.
        model: folder of the row's model.
        deadline: end of the check, in `time.monotonic` seconds.

    Returns:
        `status` (ran, skipped or failed), `reason`, `log`, and the measurements.
    """
    most = settings.seconds * _ROW_SHARE
    seconds = min(deadline - time.monotonic(), most)
    log, run = settings.output / "logs" / f"{row.name}.log", folder / row.name
    log.parent.mkdir(exist_ok=True)
    done = measured_command.run(_recipe_command(row, settings, folder, model, run), log, seconds)
    found = {"seconds": round(done.seconds, 1), "log": str(log), "gpu_peak_gib": done.gpu_peak_gib}
    found |= _measurements(run, row, settings)
    shutil.rmtree(run, ignore_errors=True)
    if done.exit_code is None and found["steps"]:
        return found | {"status": "ran", "reason": f"stopped after {done.seconds:.0f} s"}
    if done.exit_code is None:
        status = "failed" if seconds == most else "skipped"  # a row that was stopped by the deadline has not failed
        return found | {"status": status, "reason": f"no step within {done.seconds:.0f} s; last: {done.message}"}
    if done.exit_code == UserError.exit_code and " does not fit on " in done.message:  # rejected by the memory plan
        return found | {"status": "skipped", "reason": done.message.removeprefix("error: ").partition(";")[0]}
    problem = done.message if done.exit_code else _gradient_problem(found)
    if problem:
        return found | {"status": "failed", "reason": f"{problem} ({log})"}
    return found | {"status": "ran", "reason": None}


def _recipe_command(row: Row, settings: CheckSettings, folder: Path, model: Path, run: Path) -> list[str]:
    arguments = [
        *("--output-dir", str(run), "--model.name", str(model), "--model.engine", row.engine),
        *("--sampling.backend", row.backend),
        *("--data.train", str(folder / "train.jsonl"), "--data.eval", str(folder / "eval.jsonl")),
        *("--data.eval-limit", "1", "--eval.num-samples", "0"),
        *("--train.max-steps", str(_STEPS[row.backend]), "--rewards", *_REWARDS, settings.coin_reward),
    ]
    if importlib.util.find_spec("bitsandbytes") is None:
        arguments += ["--model.bits", "16", "--train.optimizer", "adamw_torch"]
    return [sys.executable, str(settings.recipe), *arguments, *settings.arguments]


def _measurements(run: Path, row: Row, settings: CheckSettings) -> dict[str, Any]:
    """Read the measurements of a finished or unfinished run."""
    record: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    steps = [line for line in read_metrics(run) if "step_time" in line]
    memory = record.get("memory") or {}
    found: dict[str, Any] = {
        "steps": len(steps),
        "torch_peak_gib": record.get("peak_gpu_memory_gib"),
        "planned_gib": max(memory.get("planned_phases_gib", {}).values(), default=None),
        "logprob_check": record.get("logprob_check"),
    }
    if not steps:
        return found

    def median(name: str) -> float | None:
        values = [step[name] for step in steps[1:] or steps if _is_finite(step.get(name))]
        return round(statistics.median(values), 3) if values else None

    config, last = record["config"], steps[-1]
    completions = config["train"]["prompts_per_step"] * config["sampling"]["num_generations"]
    length = last.get("completions/mean_length", 0.0)
    found |= {
        "preset": config["preset"],
        "bits": config["model"]["bits"],
        "micro_batch_size": memory.get("micro_batch_size", config["train"]["micro_batch_size"]),
        "completions_per_step": completions,
        "completion_tokens": length,
        "prompt_tokens": round(last.get("num_tokens", 0.0) / len(steps) / completions - length, 1),
        "grad_norm": [norm if _is_finite(norm := step.get("grad_norm")) else str(norm) for step in steps],
        "clipped_ratio": last.get("completions/clipped_ratio"),
        "step_seconds": median("step_time"),
        "rollout_seconds": median("time/rollouts"),
        "reward_seconds": median("time/rewards"),
        "training_seconds": median("time/training"),
        "tokens_per_second": median("rollouts/tokens_per_second"),
    }
    if settings.limits:
        work = StepWork(
            Shape.of(row.config),
            completions,
            found["prompt_tokens"],
            length,
            config["model"]["bits"],
            config["lora"]["rank"],
            config["train"]["gradient_checkpointing"],
        )
        bound = work.decoding_bound(settings.limits)
        found["decoding_bound_tokens_per_second"] = round(bound)
        if found["tokens_per_second"]:
            found["decoding_share"] = round(found["tokens_per_second"] / bound, 4)
        if found["training_seconds"]:
            found["training_share"] = round(work.training_share(found["training_seconds"], settings.limits), 4)
    return found


def _gradient_problem(found: dict[str, Any]) -> str | None:
    """Return the problem with the gradients of a run that exited with 0; None if there is none."""
    norms = found.get("grad_norm", [])
    if any(isinstance(norm, str) for norm in norms):
        return f"a gradient is not finite: the norms are {norms}"
    return None if any(norms) else "no step had a gradient"


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
