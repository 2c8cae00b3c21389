"""The flags of `lora-grpo evaluate`, and how they are combined with the settings of a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lora_grpo import sandbox
from lora_grpo.config import Backend, DataConfig, EvalConfig, PromptStyle, RunConfig, SamplingConfig, replace
from lora_grpo.data import columns_of, other_task
from lora_grpo.errors import UserError
from lora_grpo.flags import Flag, shown_name
from lora_grpo.models import ModelFlags, choose_adapter
from lora_grpo.prompts import template_variables
from lora_grpo.sampling import SamplingParams
from lora_grpo.tasks import TASK_NAMES, get_task, is_task_file, same_task

_OF_MODELS = ("limit", "num_samples", "temperature", "top_p", "max_completion_tokens", "few_shot", "train")
"""Options that apply to models, but not to a file of samples."""
_OF_WEIGHTS = ("backend", "bits", "base", "revision", "trust_remote_code")
"""Options that apply to models whose weights are loaded here, but not to a GGUF file or a file of samples."""


@dataclass(frozen=True)
class EvaluateOptions(ModelFlags):
    """Flags of `lora-grpo evaluate`. The settings of a run are the defaults for its adapter."""

    source: Annotated[str | None, Flag("RUN|ADAPTER|MODEL|GGUF|SAMPLES")] = None
    """Folder of a run, an adapter or a model, a Hub id, `starter`, a GGUF file, or a file of samples."""
    task: str | tuple[str, ...] | None = None
    """Task to evaluate on, such as gsm8k, or several, for one table; `lora-grpo tasks` lists them. Your file, such as
    my_task.py, is a task too. Default: the task of the run, unless it is a file, which is run only if it is named."""
    compare: str | None = None
    """Second model to compare with, on the same rows and with the same seeds: `base` (the base of the adapter, or
    the adapter that its run started from), or another run, adapter or model."""
    samples: Path | None = None
    """Grade this file instead of sampling a model: JSON Lines with `task_id` and `completion`, optionally gzipped."""
    output_dir: Path | None = None
    """Folder for results and report; default: evaluation/<task>-<hash> in the run, or
    outputs/evaluation/<name>-<task>-<hash>."""
    data: Annotated[str | None, Flag("--data", "--data.eval")] = None
    """Rows to evaluate: a JSON Lines, CSV or Parquet file, or a Hub dataset; default: the run's rows, or the task's own
    dataset."""
    train: Annotated[str | None, Flag("--data.train")] = None
    """Rows from which --few-shot takes the worked examples, in the same formats; default: the run's, or the task's own
    dataset."""
    columns: Annotated[tuple[str, ...], Flag("--data.columns")] = ()
    """Other names of columns in --data and --data.train, as NAME=COLUMN, e.g. question=problem; default: the run's, if
    it used this data."""
    options: Annotated[tuple[str, ...], Flag("--data.options")] = ()
    """Settings of a generator of reasoning-gym, as NAME=VALUE; default: the run's, if it has the same task."""
    limit: PositiveInt | None = None
    """Number of rows to evaluate on, sampled with the seed; default: the run's number, else all rows."""
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Values of k for pass@k; default: whichever of 1, 10 and 100 have enough samples."""
    num_samples: PositiveInt | None = None
    """Completions per row; default: the largest k."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Sampling temperature; 0 means greedy; default: 0 for one sample per row, else the run's value, else 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus probability; default: the run's value, else 1."""
    max_completion_tokens: PositiveInt | None = None
    """Maximum completion length in tokens; default: the run's value, else 512."""
    style: PromptStyle | None = None
    """Answer format that the prompt requests and that GSM8K's strict rule expects; default: the run's style, `code`
    for programs, `hashes` (a final line such as `#### 18`) for GSM8K samples from a file, else `xml`."""
    few_shot: NonNegativeInt | None = None
    """Worked examples before each question, from the task's training rows; default: the run's value, else 0."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed for rows, samples and intervals; default: the run's seed, else 0."""
    backend: Backend = "auto"
    """Sampling engine. `auto`: vLLM if it is installed and a GPU is available, else transformers."""
    bits: Literal[4, 16] | None = None
    """Precision of the weights: 4 (NF4, as in training) or 16; default: the run's value, else 16."""
    chat_template_kwargs: Annotated[tuple[str, ...], Flag("--model.chat-template-kwargs")] = ()
    """Variables of the chat template of a model without a run, as KEY=VALUE, e.g. enable_thinking=false. By default, a
    model with this switch thinks if --max-completion-tokens is at least 2048."""
    sandbox: sandbox.Settings = field(default_factory=sandbox.Settings)
    """Limits for the programs being graded."""

    @property
    def target(self) -> str:
        """The target to evaluate, from the positional argument and --what, or --samples."""
        if (self.source is None) == (self.samples is None):
            raise UserError("nothing or two things to evaluate; pass a run, adapter, model, Hub id or file of samples")
        return choose_adapter(str(self.samples or self.source), self.what)

    def check_used(self, *, has_model: bool, has_weights: bool) -> None:
        """Raise a UserError for a flag that would be ignored.

        Args:
            has_model: whether any target is a model, and not a file of samples.
            has_weights: whether any target is a model whose weights are loaded here, and not a GGUF file.
        """
        unused: list[str] = []
        if not has_weights:
            unused += _OF_WEIGHTS
        if not has_model:
            unused += _OF_MODELS
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in unused:
            if getattr(self, name) != defaults[name]:
                shown = shown_name(type(self), name)
                raise UserError(f"{shown} does not apply to {self.target}; leave it out")


@dataclass(frozen=True)
class EvaluationSettings:
    """The rows of an evaluation, and how models are sampled."""

    data: DataConfig
    sampling: SamplingParams
    seed: int
    chat_template_kwargs: Mapping[str, Any]
    """Chat template variables for models that are not part of a run."""
    train_seed: int
    """Seed of the training rows; the first ones are the worked examples."""
    limit: int | None
    """The `--limit`, if it leaves out rows that are evaluated by default; else None."""

    @property
    def task(self) -> str:
        return self.data.evaluation_task


def choose_settings(options: EvaluateOptions, run: Mapping[str, Any] | None) -> EvaluationSettings:
    """Combine the flags with the settings of the run that trained the model.

    Args:
        options: with one task.
        run: run.json; None if no run trained the model.
    """
    # On all rows, the run's answer style, seed and lengths are the defaults.
    changes: Mapping[str, Any] = {"sampling": {"max_completion_tokens": 512}}
    if run is not None:
        changes = run["config"]
    config = replace(RunConfig(), changes)
    task = _choose_task(options, config if run else None)
    seed = config.seed if options.seed is None else options.seed

    # On the task that the run was evaluated on, so are its other settings of data, temperature and nucleus probability.
    if run is not None and same_task(config.data.evaluation_task, task):
        default_data = _data_of_run(options, config.data, task)
        if options.data not in (None, config.data.eval):  # other rows have columns and a number of their own
            default_data = dataclasses.replace(default_data, columns=(), eval_limit=None)
        default_decoding = config.eval
        train_seed = config.seed
    else:
        default_data = other_task(config.data, task)
        default_decoding = RunConfig().eval
        train_seed = seed

    return EvaluationSettings(
        data=_choose_data(options, default_data),
        sampling=_choose_sampling(options, default_decoding, default_lengths=config.sampling),
        seed=seed,
        chat_template_kwargs=template_variables.parse_kwargs(options.chat_template_kwargs),
        train_seed=train_seed,
        limit=_choose_limit(options.limit, default_data.eval_limit),
    )


def _choose_task(options: EvaluateOptions, run_config: RunConfig | None) -> str:
    """Return the task: the one of the flag, else that of the run."""
    assert not isinstance(options.task, tuple)  # each task has its own settings
    task = options.task
    if task is None and run_config:
        task = run_config.data.evaluation_task
    if task is None:
        raise UserError(f"--task is missing; expected {', '.join(TASK_NAMES)}, or a file: my_task.py")
    if is_task_file(task) and not options.task:
        raise UserError(f"the run was trained on a file, {task}; pass --task {shlex.quote(task)} to run it")
    get_task(task)
    return task


def _data_of_run(options: EvaluateOptions, data: DataConfig, task: str) -> DataConfig:
    """Return the data of a run for its own task, without running a training file that the flags do not name."""
    if not is_task_file(data.task) or same_task(data.task, task):
        return data
    if data.few_shot and options.few_shot != 0:
        raise UserError(f"the worked examples are those of {data.task}, which is not run; pass --few-shot 0")
    return dataclasses.replace(data, task=task, eval_task=None)


def _choose_data(options: EvaluateOptions, default: DataConfig) -> DataConfig:
    """Return the settings of rows and prompts: those of the flags, else the defaults."""
    flags: dict[str, Any] = {
        "eval": options.data,
        "train": options.train,
        "columns": options.columns or None,
        "options": options.options or None,
        "eval_limit": options.limit,
        "prompt_style": options.style,
        "few_shot": options.few_shot,
    }
    data = dataclasses.replace(default, **{name: value for name, value in flags.items() if value is not None})
    if options.style and get_task(data.evaluation_task).has_own_prompts:
        raise UserError(f"--style has no effect on the prompts of {data.evaluation_task}; leave it out")
    if options.train and not data.few_shot:
        raise UserError("--data.train has only the rows of worked examples; pass --few-shot too, or leave it out")
    columns_of(data, "eval")
    return data


def _choose_sampling(
    options: EvaluateOptions, default_decoding: EvalConfig, default_lengths: SamplingConfig
) -> SamplingParams:
    """Return how the model is sampled. One sample of a row is greedy unless a temperature is given.

    Args:
        default_decoding: has the default temperature and nucleus probability.
        default_lengths: has the default maximum lengths of completions and turns.
    """
    num_samples = options.num_samples or max(options.k or (1,))
    temperature = options.temperature
    if temperature is None:
        temperature = default_decoding.temperature if num_samples > 1 else 0.0
    if num_samples > 1 and not temperature:
        raise UserError(f"{num_samples} greedy samples of a row are all the same; pass --temperature 1")
    if options.top_p is not None and not temperature:
        raise UserError("--top-p has no effect on greedy samples; pass --temperature or --num-samples, or leave it out")
    top_p = 1.0
    if temperature:
        top_p = options.top_p or default_decoding.top_p
    return SamplingParams(
        num_samples=num_samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=options.max_completion_tokens or default_lengths.max_completion_tokens,
        max_turn_tokens=default_lengths.max_turn_tokens,
    )


def _choose_limit(limit: int | None, default_limit: int | None) -> int | None:
    """Return the `--limit` if it leaves out rows that are evaluated by default, else None."""
    if limit and (default_limit is None or limit < default_limit):
        return limit
    return None
