"""One row of a GPU check: the recipe as a command with an engine and a sampling backend, and what its files tell."""

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
from lora_grpo.files import json_files
from lora_grpo.gpu_check import pretended_card, timed_command
from lora_grpo.gpu_check.gpu_memory import MemoryWatch
from lora_grpo.gpu_check.random_model import Sizes
from lora_grpo.models import Shape
from lora_grpo.planning import Limits, StepWork

ENGINES, BACKENDS = ("peft", "unsloth"), ("vllm", "transformers")
_STEPS = {"vllm": 3, "transformers": 2}
"""Of each row; the first is for warming up and counts only where there is no other."""
_ROW_SHARE = 1 / 3
"""Of all the time, for one row."""
_REWARDS = ("correct_answer=2.0", "soft_xml_format=0.5")
_COIN = "pattern:x77[01][0-9][0-9]=1.0"
"""Random words earn nothing of the others, and equal rewards have no gradient. About half of the completions of 512
words have one of these 200 of 151,936."""


@dataclass(frozen=True)
class Row:
    """One combination."""

    model: str
    """Name of the sizes, e.g. `0.5B`."""
    sizes: Sizes
    engine: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.engine}-{self.backend}"


@dataclass(frozen=True)
class Plan:
    """What is the same for every row."""

    recipe: Path
    """The script."""
    output: Path
    """Folder of the results."""
    seconds: float
    """For everything."""
    arguments: tuple[str, ...] = ()
    """More arguments for the recipe, the last to be given."""
    coin: str = _COIN
    """A reward that about half of the random completions earn."""
    pretend_gib: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What the results say of the machine."""
    limits: Limits | None = None


def missing_packages(row: Row) -> str | None:
    """Say which package a row lacks."""
    needed = (["unsloth"] if row.engine == "unsloth" else []) + (["vllm"] if row.backend == "vllm" else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def run_row(row: Row, plan: Plan, folder: Path, model: Path, ends: float) -> dict[str, Any]:
    """Run one row.

    Args:
        row: the combination.
        plan: what is the same for every row.
        folder: holds the problems; the run's own folder is made in it and deleted.
        model: folder of the row's model.
        ends: when all time is used up, as `time.monotonic` tells it.

    Returns:
        `status` (ran, skipped or failed), `reason`, `log`, and what was measured.
    """
    seconds = min(ends - time.monotonic(), plan.seconds * _ROW_SHARE)
    logs = plan.output / "logs"
    logs.mkdir(exist_ok=True)
    log, run = logs / f"{row.name}.log", folder / row.name
    with MemoryWatch() as watch:
        started = time.monotonic()
        code, last = timed_command.run(_recipe_command(row, plan, folder, model, run), log, seconds)
        took = time.monotonic() - started
    found = {"seconds": round(took, 1), "log": str(log), "card_peak_gib": watch.peak_gib}
    found |= _figures(run, row, plan)
    shutil.rmtree(run, ignore_errors=True)
    if code is None and found["steps"]:
        return found | {"status": "ran", "reason": f"stopped after {took:.0f} s"}
    if code is None:
        # A row that had all of its time has failed; one that had what was left of it has not.
        status = "failed" if seconds >= plan.seconds * _ROW_SHARE else "skipped"
        return found | {"status": status, "reason": f"no step within {took:.0f} s; last: {last}"}
    if code == UserError.exit_code and " does not fit on " in last:  # the kit's own plan, before anything is loaded
        return found | {"status": "skipped", "reason": last.removeprefix("error: ").partition(";")[0]}
    if code:
        return found | {"status": "failed", "reason": f"{last} ({log})"}
    wrong = _wrong(found)
    return found | ({"status": "failed", "reason": f"{wrong} ({log})"} if wrong else {"status": "ran", "reason": None})


def _recipe_command(row: Row, plan: Plan, folder: Path, model: Path, run: Path) -> list[str]:
    arguments = [
        *("--output-dir", str(run), "--model.name", str(model), "--model.engine", row.engine),
        *("--sampling.backend", row.backend),
        *("--data.train", str(folder / "train.jsonl"), "--data.eval", str(folder / "eval.jsonl")),
        *("--data.eval-limit", "1", "--eval.num-samples", "0"),
        *("--train.max-steps", str(_STEPS[row.backend]), "--rewards", *_REWARDS, plan.coin),
    ]
    if importlib.util.find_spec("bitsandbytes") is None:
        arguments += ["--model.bits", "16", "--train.optimizer", "adamw_torch"]
    arguments += plan.arguments
    if plan.pretend_gib:
        return pretended_card.command(plan.pretend_gib, plan.recipe, arguments)
    return [sys.executable, str(plan.recipe), *arguments]


def _figures(run: Path, row: Row, plan: Plan) -> dict[str, Any]:
    """Read what a run has left, finished or not."""
    record: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    steps = [line for line in json_files.read_finished_lines(run / "metrics.jsonl") if "step_time" in line]
    found: dict[str, Any] = {
        "steps": len(steps),
        "torch_peak_gib": record.get("peak_gpu_memory_gib"),
        "logprob_check": record.get("logprob_check"),
    }
    if planned := record.get("memory"):
        found |= {"memory_plan": planned, "planned_gib": max(planned["planned_phases_gib"].values())}
    if not steps:
        return found
    counted = steps[1:] or steps

    def middle(name: str) -> float | None:
        values = [step[name] for step in counted if _is_finite(step.get(name))]
        return round(statistics.median(values), 3) if values else None

    config = record["config"]
    completions = config["train"]["prompts_per_step"] * config["sampling"]["num_generations"]
    length = steps[-1].get("completions/mean_length", 0.0)
    found |= {
        "preset": config["preset"],
        "bits": config["model"]["bits"],
        "micro_batch_size": (record.get("memory") or {}).get("micro_batch_size", config["train"]["micro_batch_size"]),
        "completions_per_step": completions,
        "completion_tokens": length,
        "prompt_tokens": round(steps[-1].get("num_tokens", 0.0) / len(steps) / completions - length, 1),
        "grad_norm": [norm if _is_finite(norm := step.get("grad_norm")) else str(norm) for step in steps],
        "clipped_ratio": steps[-1].get("completions/clipped_ratio"),
        "step_seconds": middle("step_time"),
        "rollout_seconds": middle("time/rollouts"),
        "reward_seconds": middle("time/rewards"),
        "training_seconds": middle("time/training"),
        "tokens_per_second": middle("rollouts/tokens_per_second"),
    }
    if plan.limits is None:
        return found
    work = StepWork(
        Shape.of(row.sizes.config()),
        completions,
        found["prompt_tokens"],
        length,
        config["model"]["bits"],
        config["lora"]["rank"],
        config["train"]["gradient_checkpointing"],
    )
    bound = work.decoding_bound(plan.limits)
    found["decoding_bound_tokens_per_second"] = round(bound)
    if found["tokens_per_second"]:
        found["decoding_share"] = round(found["tokens_per_second"] / bound, 4)
    if found["training_seconds"]:
        found["training_share"] = round(work.training_share(found["training_seconds"], plan.limits), 4)
    return found


def _wrong(found: dict[str, Any]) -> str | None:
    """Say what a run that ended well has nevertheless done wrong."""
    norms = found.get("grad_norm", [])
    if any(isinstance(norm, str) for norm in norms):
        return f"a gradient is not finite: its norms are {norms}"
    if not any(norms):
        return "no step had a gradient"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
