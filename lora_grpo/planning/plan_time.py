"""How long a run takes: from steps that were measured in its folder, else from what its GPU is said to do."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.config import RunConfig
from lora_grpo.files import json_files
from lora_grpo.models import Shape
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.gpu_rates import rates_of
from lora_grpo.planning.roofline import StepWork

MEASURED_STEPS = 3
"""So many steps of a run say how long the others take; the first, which warms up, is left out."""
TRAINING_SHARE = (0.15, 0.5)
"""Of the matrix rate that NVIDIA states, that a pass reaches: least and most. A guess: no GPU was measured."""
DECODING_SHARES = {"vllm": (0.15, 0.6), "shared": (0.15, 0.6), "transformers": (0.01, 0.1)}
"""Of what bandwidth and matrix rate allow, that decoding reaches, by sampler. Guesses as well."""
_SECTIONS = ("model", "lora", "sampling")
_TRAIN = ("prompts_per_step", "micro_batch_size", "gradient_checkpointing", "optimizer")


@dataclass(frozen=True)
class Work:
    """What a run has to do, every prompt and completion at its longest."""

    steps: int
    """That are still to come."""
    completions_per_step: int
    prompt_tokens: int
    """Longest prompt that the context leaves room for."""
    completion_tokens: int
    evaluated: int | None
    """Completions of the evaluations before and after; None where the number of held-out rows is not known yet."""

    @classmethod
    def of(cls, config: RunConfig, done: int = 0) -> Work:
        """Return the work of a run of which `done` steps are behind it."""
        each, rows = config.eval.num_samples + 1, config.data.eval_limit  # the greedy one besides
        evaluated = None if rows is None else 2 * rows * each
        return cls(
            steps=max(0, config.train.max_steps - done),
            completions_per_step=config.train.prompts_per_step * config.sampling.num_generations,
            prompt_tokens=config.model.max_sequence_tokens - config.sampling.max_completion_tokens,
            completion_tokens=config.sampling.max_completion_tokens,
            evaluated=0 if config.data.evaluation_task == "prompts" else evaluated,
        )

    @property
    def completions(self) -> int:
        """Of all steps."""
        return self.steps * self.completions_per_step

    @property
    def tokens(self) -> int:
        """Of all steps, prompts and completions: a bound."""
        return self.completions * (self.prompt_tokens + self.completion_tokens)


@dataclass(frozen=True)
class Time:
    """An estimate in seconds, or why there is none."""

    training: tuple[float, float] | None
    """Of the steps, least and most: one figure twice where it was measured."""
    evaluating: tuple[float, float] | None
    """Of the evaluations before and after; None where it is not known."""
    source: str
    """What it comes from, or what would give one."""

    def said(self) -> str:
        """Say it in one line."""
        if self.training is None:
            return self.source
        text = f"{_duration(self.training)} for the steps"
        if self.evaluating and self.evaluating[1]:
            text += f" and {_duration(self.evaluating)} for the evaluations before and after"
        elif self.evaluating is None:
            text += ", evaluations before and after not counted"
        return f"{text} ({self.source})"

    def record(self) -> dict[str, Any]:
        """Return what run.json says of it."""
        both = {"training_seconds": self.training, "evaluation_seconds": self.evaluating}
        return {
            **{name: value and [round(each) for each in value] for name, value in both.items()},
            "source": self.source,
        }


def estimate(
    config: RunConfig, work: Work, shape: Shape | None, fit: Fit | None, derived: Collection[str] = ()
) -> Time:
    """Return how long a run takes.

    Args:
        config: the settled configuration.
        work: what there is to do.
        shape: of the model; None where it is not known.
        fit: how the run uses its memory; None where that was not planned.
        derived: settings that follow from the memory.
    """
    measured = _measured(config, derived)
    if measured:
        seconds, steps = measured
        told = f"measured: the median of {steps} steps in {config.output_dir}, {seconds:.1f} s a step"
        return Time((work.steps * seconds,) * 2, None if work.evaluated != 0 else (0.0, 0.0), told)
    later = (
        f"the first {MEASURED_STEPS} steps of a run in {config.output_dir} give one (--plan reads its metrics.jsonl)"
    )
    if shape is None or fit is None:
        return Time(None, None, f"no estimate, because the memory is not planned; {later}")
    if fit.card.on_cpu:
        return Time(None, None, f"no estimate for a CPU; {later}")
    rates = rates_of(fit.card.name)
    if rates is None:
        return Time(None, None, f"no estimate: the rates of {fit.card.name} are not known here; {later}")
    each = StepWork(
        shape,
        fit.max_num_seqs,
        work.prompt_tokens,
        work.completion_tokens,
        config.model.bits,
        config.lora.rank,
        config.train.gradient_checkpointing,
    )
    tokens_a_second, operations = each.decoding_bound(rates), each.training_operations() / fit.max_num_seqs

    def drawing(completions: int) -> tuple[float, float]:
        rounds = math.ceil(completions / fit.max_num_seqs)
        return _over(rounds * fit.max_num_seqs * work.completion_tokens / tokens_a_second, DECODING_SHARES[fit.sampler])

    a_step = drawing(work.completions_per_step)
    a_pass = _over(work.completions_per_step * operations / (rates.matmul_tflops * 1e12), TRAINING_SHARE)
    training = work.steps * (a_step[0] + a_pass[0]), work.steps * (a_step[1] + a_pass[1])
    told = (
        f"{rates.copy_gb_per_second:g} GB/s and {rates.matmul_tflops:g} TFLOPS that NVIDIA states for a "
        f"{fit.card.name}, times guessed shares of them; every completion at its longest, rewards not counted"
    )
    return Time(training, None if work.evaluated is None else drawing(work.evaluated), told)


def _duration(seconds: tuple[float, float]) -> str:
    """Write a range of seconds to two digits: 12 to 40 min."""
    units = ((86400, "days", 2 * 86400), (3600, "h", 3600), (60, "min", 60), (1, "s", 0))
    size, unit = next((size, unit) for size, unit, least in units if seconds[1] >= least)
    low, high = (f"{float(f'{each / size:.2g}'):,.10g}" for each in seconds)
    return f"{high} {unit}" if low == high else f"{low} to {high} {unit}"


def _over(seconds: float, shares: tuple[float, float]) -> tuple[float, float]:
    """Return the time at the larger and at the smaller share."""
    return seconds / shares[1], seconds / shares[0]


def _measured(config: RunConfig, derived: Collection[str]) -> tuple[float, int] | None:
    """Return the median seconds of a step of the run in the output folder, and of how many, if it is one like this."""
    folder = Path(config.output_dir)
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        before, followed = record["config"], (record.get("memory") or {}).get("derived", ())
        # What followed from the memory differs with what was free, and hardly changes the time.
        open_both_times = {*derived} & {*followed}
        now = json.loads(json.dumps(config.to_dict()))
        if _same_work(before, open_both_times) != _same_work(now, open_both_times):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    lines = [line for line in json_files.read_finished_lines(folder / "metrics.jsonl") if isinstance(line, dict)]
    seconds = [line["step_time"] for line in lines if isinstance(line.get("step_time"), (int, float))][1:]
    return (statistics.median(seconds), len(seconds)) if len(seconds) >= MEASURED_STEPS - 1 else None


def _same_work(settings: dict[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Return the settings that decide how long a step takes, by their dotted names."""
    sections = {name: settings[name] for name in _SECTIONS}
    sections["train"] = {name: settings["train"][name] for name in _TRAIN}
    found = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return {name: value for name, value in found.items() if name not in {"model.gpu_memory_share", *ignored}}
