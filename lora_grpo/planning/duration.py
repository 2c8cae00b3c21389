"""The work of a run, and its duration estimated from measured steps or from the GPU's published rates."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.files import json_files
from lora_grpo.models import Shape
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.roofline import StepWork, published_limits
from lora_grpo.runs import Run, newest_step, read_metrics, read_record

_MEASURED_STEPS = 3
"""Minimum number of steps for an estimate. The first is a warm-up and does not count."""
TRAINING_SHARE = (0.15, 0.5)
"""Lowest and highest share of the published matmul throughput that training reaches. Guesses, never measured."""
SAMPLING_SHARES = {"vllm": (0.15, 0.6), "shared": (0.15, 0.6), "transformers": (0.01, 0.1)}
"""Lowest and highest share of the decoding bound that a sampler reaches. Also guesses."""


@dataclass(frozen=True)
class Work:
    """The remaining work of a run, with every prompt and completion at its maximum length."""

    steps: int
    """With `hours`: highest estimate of the number of steps that fit; 0 if unknown."""
    completions_per_step: int
    prompt_tokens: int
    """Longest prompt that fits in the context."""
    completion_tokens: int
    trained_on: str
    """`completions`, or `gold solutions` in SFT."""
    evaluated: int | None
    """Completions of the `evaluations`; None if the number of rows is not known yet."""
    evaluations: int = 2
    """2, before and after training; 1 if a resumed run has evaluated the base."""
    hours: float | None = None
    """Hours that are left for a run with `--hours`."""
    fewest_steps: int | None = None
    """With `hours`: lowest estimate of the number of steps that fit; None if unknown."""

    @classmethod
    def of(cls, config: RunConfig, *, resumed: bool = False) -> Work:
        """Return the work of a run, or what remains of a resumed one."""
        path = config.folder / "run.json"
        run = Run(config, json_files.read_object(path) if resumed and path.is_file() else {})
        done = newest_step(config.folder / "checkpoints") if resumed else 0
        evaluations = 1 if done or (resumed and _has_begun_training(run)) else 2
        rows, completion = config.data.eval_limit, config.sampling.max_completion_tokens
        samples = config.eval.num_samples + 1  # 1 for greedy decoding
        return cls(
            steps=0 if run.seems_trained() else max(0, config.train.max_steps - done),
            completions_per_step=batch_shape(config, world_size=1).completions_per_step,
            prompt_tokens=config.model.max_sequence_tokens - completion,
            completion_tokens=completion,
            trained_on="gold solutions" if config.method == "sft" else "completions",
            evaluated=None if rows is None else evaluations * rows * samples,
            evaluations=evaluations,
        )

    @property
    def completions(self) -> int:
        return self.steps * self.completions_per_step

    @property
    def tokens(self) -> int:
        """Upper bound of the tokens of all steps, including prompts."""
        return self.completions * (self.prompt_tokens + self.completion_tokens)


@dataclass(frozen=True)
class Duration:
    """Lowest and highest estimate of a run's duration, in seconds; None if unknown."""

    source: str
    """The source of the estimate, or how to get one."""
    training: tuple[float, float] | None = None
    evaluation: tuple[float, float] | None = None
    """The `evaluations`."""
    evaluations: int = 2
    """2, before and after training, or only the second."""
    trained: str = "the steps"
    """What `training` is the duration of."""

    def text(self) -> str:
        """Return the estimate as one line."""
        if self.training is None:
            return self.source
        line = f"{_range(self.training)} for {self.trained}"
        if self.evaluation:
            evaluations = "the final evaluation" if self.evaluations == 1 else "the evaluations before and after"
            line += f" and {_range(self.evaluation)} for {evaluations}"
        return f"{line} ({self.source})"


def estimate(config: RunConfig, work: Work, shape: Shape | None, fit: Fit | None) -> Duration:
    """Estimate the duration of a run from its resolved configuration. Shape and fit are None without a memory plan."""
    if measured := _measured_steps(config):
        seconds = statistics.median(measured)
        source = f"measured: the median of {len(measured)} steps in {config.output_dir}, {seconds:.1f} s per step"
        return Duration(source, (work.steps * seconds,) * 2, _measured_evaluations(config, work), work.evaluations)
    hint = f"run {_MEASURED_STEPS} steps in {config.output_dir} and repeat --plan, which reads its metrics.jsonl"
    if shape is None or fit is None:
        return Duration(f"no estimate, because the memory is not planned; {hint}")
    if fit.device.on_cpu:
        return Duration(f"no estimate for a CPU; {hint}")
    limits = published_limits(fit.device.name)
    if limits is None:
        return Duration(f"no estimate: the rates of {fit.device.name} are unknown; {hint}")
    step = StepWork(
        shape,
        fit.max_num_seqs,
        work.prompt_tokens,
        work.completion_tokens,
        config.model.bits,
        config.lora.rank,
        config.train.gradient_checkpointing,
    )
    tokens_per_second = step.decoding_bound(limits)

    processes = distributed.world_size()  # which sample and train at the same time

    def sampling(completions: int) -> tuple[float, float]:
        rounds = math.ceil(completions / processes / fit.max_num_seqs)
        tokens = rounds * fit.max_num_seqs * work.completion_tokens
        return _at_shares(tokens / tokens_per_second, SAMPLING_SHARES[fit.sampler])

    sampled = (0.0, 0.0) if config.method == "sft" else sampling(work.completions_per_step)
    operations = work.completions_per_step / processes * step.training_operations() / fit.max_num_seqs
    trained = _at_shares(operations / (limits.matmul_tflops * 1e12), TRAINING_SHARE)
    source = (
        f"from NVIDIA's {limits.copy_gb_per_second:g} GB/s and {limits.matmul_tflops:g} TFLOPS for a "
        f"{fit.device.name} and guessed shares of them; {work.trained_on} at maximum length, rewards not included"
    )
    training = work.steps * (sampled[0] + trained[0]), work.steps * (sampled[1] + trained[1])
    return Duration(source, training, sampling(work.evaluated) if work.evaluated else None, work.evaluations)


def within_hours(config: RunConfig, work: Work, estimated: Duration, *, resumed: bool) -> tuple[Work, Duration]:
    """Return the work that fits in `--hours`, and the duration of one step and of the evaluations."""
    if not work.steps:  # only the final evaluation is left
        return work, estimated
    hours = config.hours or 0.0
    if resumed and (config.folder / "run.json").is_file():
        hours = max(0.0, hours - read_record(config.folder)["seconds_worked"] / 3600)
    if estimated.training is None:
        return dataclasses.replace(work, steps=0, hours=hours), estimated
    fastest, slowest = (seconds / work.steps for seconds in estimated.training)
    least, longest = estimated.evaluation or (0.0, 0.0)
    fewest = max(0, min(work.steps, int((3600 * hours - longest) / slowest)))
    most = max(0, min(work.steps, int((3600 * hours - least) / fastest)))
    one_step = dataclasses.replace(estimated, training=(fastest, slowest), trained="each step")
    return dataclasses.replace(work, steps=most, fewest_steps=fewest, hours=hours), one_step


def _range(seconds: tuple[float, float]) -> str:
    """Format a range of seconds with two significant digits: 12 to 40 min."""
    units = ((86400, "days", 2 * 86400), (3600, "h", 3600), (60, "min", 60), (1, "s", 0))
    size, unit = next((size, unit) for size, unit, least in units if seconds[1] >= least)
    low, high = (f"{float(f'{each / size:.2g}'):,.10g}" for each in seconds)
    return f"{high} {unit}" if low == high else f"{low} to {high} {unit}"


def _at_shares(seconds: float, shares: tuple[float, float]) -> tuple[float, float]:
    """Return the time at the highest and the lowest share of the limit."""
    return seconds / shares[1], seconds / shares[0]


def _measured_steps(config: RunConfig) -> list[float]:
    """Return the step times in the output folder, without the first; [] if the settings differ or steps are missing."""
    try:
        record = json.loads((config.folder / "run.json").read_text(encoding="utf-8"))
        if _speed_settings(record["config"]) != _speed_settings(config.to_dict()):
            return []
    except (OSError, ValueError, KeyError, TypeError):
        return []
    lines = read_metrics(config.folder)
    seconds = [line["step_time"] for line in lines if isinstance(line.get("step_time"), (int, float))]
    return seconds[1:] if len(seconds) >= _MEASURED_STEPS else []


def _has_begun_training(run: Run) -> bool:
    """Return whether a run has done a step or, with `--hours`, begun with it."""
    return "training_began" in (run.record.get("time_budget") or {}) or bool(read_metrics(run.folder))


def _measured_evaluations(config: RunConfig, work: Work) -> tuple[float, float] | None:
    """Return the time of the evaluations, from that of the base in the output folder.

    None if it was another evaluation or not timed.
    """
    record, current = json.loads((config.folder / "run.json").read_text(encoding="utf-8")), config.to_dict()
    seconds = record.get("evaluation_seconds", {}).get("base")
    alike = all(record["config"].get(name) == current[name] for name in ("data", "eval"))
    return (work.evaluations * seconds,) * 2 if seconds and alike else None


def _speed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the method and the settings that affect the duration of a step, by section."""
    names = ("prompts_per_step", "micro_batch_size", "gradient_checkpointing", "optimizer")
    return {
        "method": settings.get("method", "grpo"),
        # The share depends on the free memory and hardly affects the duration.
        "model": settings["model"] | {"gpu_memory_share": None},
        "lora": settings["lora"],
        "sampling": settings["sampling"],
        "train": {name: settings["train"][name] for name in names},
    }
