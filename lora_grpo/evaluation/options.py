"""The flags of `scripts/evaluate.py`, and how they are combined with the settings of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lora_grpo import sandbox
from lora_grpo.config import DataConfig, flag
from lora_grpo.errors import UserError
from lora_grpo.evaluation.run import RowSampling
from lora_grpo.tasks import CODE_TASKS, GradedTask, get_task, runs_programs

DEFAULT_MAX_TOKENS = 512
"""Longest completion of a model without a run, in tokens. The limit is half of the context if that is less."""

_FOR_MODELS = (
    *("limit", "num_samples", "temperature", "top_p", "max_completion_tokens", "few_shot", "few_shot_data"),
    *("backend", "bits", "base", "revision", "trust_remote_code"),
)

StyleName = Literal["xml", "hashes", "think", "code"]


@dataclass(frozen=True)
class EvaluateOptions:
    """Flags of `scripts/evaluate.py`. The settings of a run are the defaults for its adapter."""

    what: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|ADAPTER|MODEL|SAMPLES")] = None
    """Folder of a run, an adapter or a model, a Hub id, `starter`, or a file of samples."""
    task: GradedTask | None = None
    """Task to evaluate on; default: the evaluation task of the run."""
    compare: str | None = None
    """Second model to compare with, on the same rows and with the same seeds: `base` (the base of the adapter), or any
    other target."""
    samples: Path | None = None
    """Grade this file instead of sampling a model: JSON Lines with `task_id` and `completion`, optionally gzipped."""
    output_dir: Path | None = None
    """Folder for results and report; default: evaluation/<task>-<hash> in the run, or
    outputs/evaluation/<name>-<task>-<hash>."""
    overwrite: bool = False
    """Delete another evaluation in --output-dir."""
    data: str | None = None
    """Rows of the task: a JSON Lines file, optionally gzipped, or a Hub dataset; default: the run's rows, or the task's
    own dataset."""
    limit: int | None = None
    """Number of rows to evaluate on, sampled with the seed; default: the run's number, else all rows."""
    k: tuple[int, ...] | None = None
    """Values of k for pass@k; default: 1, or 1, 10 and 100 for a file with enough samples per task."""
    num_samples: int | None = None
    """Completions per row; default: the largest k."""
    temperature: float | None = None
    """Softmax temperature, 0 is greedy; default: 0 for one sample per row, else the run's value, else 1."""
    top_p: float | None = None
    """Nucleus probability; default: the run's value, else 1."""
    max_completion_tokens: int | None = None
    """Longest completion in tokens; default: the run's value, else 512 or half of the context if less."""
    style: StyleName | None = None
    """Answer format that the prompt requests and that GSM8K's strict rule expects; default: the run's style, `code`
    for programs, `hashes` (a last line `#### 18`) for GSM8K samples from a file, else `xml`."""
    few_shot: int | None = None
    """Worked examples before each question, from the task's training rows; default: the run's value, else 0."""
    few_shot_data: str | None = None
    """Source of the worked examples, as in --data; default: the training rows of the run or of the task."""
    seed: int | None = None
    """Seed for rows, samples and intervals; default: the run's seed, else 0."""
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    """Sampling engine. `auto`: vLLM if it is installed and a GPU is available, else transformers."""
    bits: Literal[4, 16] | None = None
    """Precision of the weights: 4 (NF4, as in training) or 16; default: the run's value, else 16."""
    base: str | None = None
    """Base model of an adapter, if the one in the adapter's configuration has moved."""
    revision: str | None = None
    """Hub commit, branch or tag of the model."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository."""
    sandbox: sandbox.Settings = field(default_factory=sandbox.Settings)
    """Limits for the programs being graded."""

    @property
    def target(self) -> str:
        """The target to evaluate, from the positional argument or --samples.

        Raises:
            UserError: both or neither were passed.
        """
        if self.what is not None and self.samples is not None:
            raise UserError(f"got both {self.what} and --samples {self.samples}; pass one of them")
        if self.what is None and self.samples is None:
            raise UserError("nothing to evaluate; pass a run, an adapter, a model, a Hub id or a file of samples")
        return self.what or str(self.samples)

    def check(self) -> None:
        """Check that values are in range.

        Raises:
            UserError: a value is out of range.
        """
        for name, fits, expected in (
            ("num_samples", lambda n: n >= 1, "at least 1"),
            ("temperature", lambda t: 0 <= t < float("inf"), "0 or more"),
            ("top_p", lambda p: 0 < p <= 1, "more than 0 and at most 1"),
            ("max_completion_tokens", lambda n: n >= 1, "at least 1"),
            ("limit", lambda n: n >= 1, "at least 1"),
            ("few_shot", lambda n: n >= 0, "0 or more"),
            ("seed", lambda n: 0 <= n < 2**32, f"0 to {2**32 - 1}"),
        ):
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise UserError(f"{flag(name)} is {value}; expected {expected}")
        if self.k is not None and (not self.k or min(self.k) < 1):
            given = " ".join(map(str, self.k)) or "empty"
            raise UserError(f"--k is {given}; expected whole numbers of at least 1")
        sandbox.check_settings(self.sandbox)

    def check_for_files(self) -> None:
        """Check that no flag for models is set. Called if only files of samples are evaluated.

        Raises:
            UserError: a flag for models is set.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _FOR_MODELS:
            if getattr(self, name) != defaults[name]:
                raise UserError(f"{flag(name)} is for models, and {self.target} is a file of samples; leave it out")


@dataclass(frozen=True)
class Plan:
    """How models are sampled."""

    data: DataConfig
    sampling: RowSampling
    ks: tuple[int, ...]
    seed: int
    limits: sandbox.Settings
    run: Mapping[str, Any] | None
    """run.json of the run whose settings are the defaults, if any."""
    trained_seed: int | None
    """Seed of that run if it trained on this data."""

    @property
    def task(self) -> str:
        return self.data.evaluation_task

    @property
    def request(self) -> dict[str, Any]:
        """The settings that determine samples and verdicts, in addition to the rows and the model."""
        programs = runs_programs(self.data)
        return {
            "task": self.task,
            "prompt_style": self.data.prompt_style,
            "few_shot": self.data.few_shot,
            "num_samples": self.sampling.num_samples,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_completion_tokens": self.sampling.max_tokens,
            "seed": self.seed,
            "program_seconds": self.limits.timeout_seconds if programs else None,
            "program_mb": self.limits.memory_mb if programs else None,
        }


def make_plan(options: EvaluateOptions, run: Mapping[str, Any] | None, context: int | None) -> Plan:
    """Combine the flags with the settings of a run.

    Args:
        options: the flags.
        run: run.json of the run that trained the model, if any.
        context: the model's context length in tokens, if known.

    Raises:
        UserError: no task is specified, or settings conflict.
    """
    settings = run["config"] if run else None
    of_run = DataConfig(**settings["data"]) if settings else None
    task = options.task or (of_run.evaluation_task if of_run else None)
    if task is None:
        raise UserError("--task is missing; expected gsm8k, humaneval, mbpp, starter or starter-code")
    if task == "prompts":
        raise UserError("the task `prompts` has no correct answers to evaluate; pass another --task")
    trained = bool(of_run and of_run.evaluation_task == task and options.data in (None, of_run.eval))
    if of_run and trained:
        data = of_run
        if options.few_shot_data and getattr(get_task(task), "ONE_SPLIT", False):
            raise UserError(f"--few-shot-data cannot be combined with a run that trained on {task} itself")
    else:
        style = of_run.prompt_style if of_run and of_run.prompt_style != "code" else "xml"
        data = DataConfig(task=task, prompt_style="code" if task in CODE_TASKS else style)
    changes: dict[str, Any] = {
        "eval": options.data,
        "eval_limit": options.limit,
        "prompt_style": options.style,
        "few_shot": options.few_shot,
        "train": options.few_shot_data,
    }
    data = dataclasses.replace(data, **{name: value for name, value in changes.items() if value is not None})
    max_tokens = options.max_completion_tokens
    if max_tokens is None:
        half = (context or 2 * DEFAULT_MAX_TOKENS) // 2
        max_tokens = settings["sampling"]["max_completion_tokens"] if settings else min(DEFAULT_MAX_TOKENS, half)
    run_seed = settings["seed"] if settings else 0
    ks = tuple(sorted(set(options.k or (1,))))
    return Plan(
        data=data,
        sampling=_sampling(options, max(ks), max_tokens, settings["eval"] if settings and trained else {}),
        ks=ks,
        seed=run_seed if options.seed is None else options.seed,
        limits=options.sandbox,
        run=run,
        trained_seed=run_seed if trained else None,
    )


def _sampling(options: EvaluateOptions, largest_k: int, max_tokens: int, defaults: Mapping[str, Any]) -> RowSampling:
    num_samples = largest_k if options.num_samples is None else options.num_samples
    temperature, top_p = options.temperature, options.top_p
    if temperature is None:
        temperature = 0.0 if num_samples == 1 else defaults.get("temperature", 1.0)
    if top_p is None:
        top_p = defaults.get("top_p", 1.0)
    if largest_k > num_samples:
        raise UserError(f"--k {largest_k} exceeds --num-samples {num_samples}; pass --num-samples {largest_k}")
    if temperature == 0 and num_samples > 1:
        raise UserError(f"{num_samples} greedy samples of a row are all the same; pass --temperature 1")
    return RowSampling(num_samples, temperature, 1.0 if temperature == 0 else top_p, max_tokens)
