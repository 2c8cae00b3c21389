"""The flags of `scripts/evaluate.py`, and what they come to for a run, which brings settings of its own."""

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
from lora_grpo.evaluation.run import Draws
from lora_grpo.tasks import CODE_TASKS, get_task, runs_programs

DEFAULT_MAX_TOKENS = 512
"""Longest completion of a model that no run says anything of; half of its context where that is less."""

_FOR_MODELS = (
    *("limit", "num_samples", "temperature", "top_p", "max_completion_tokens", "few_shot", "few_shot_data"),
    *("backend", "bits", "base", "revision", "trust_remote_code"),
)

TaskName = Literal["gsm8k", "humaneval", "mbpp", "starter", "starter-code"]
StyleName = Literal["xml", "hashes", "think", "code"]


@dataclass(frozen=True)
class Options:
    """Flags of `scripts/evaluate.py`; a run brings settings of its own, which hold unless a flag says otherwise."""

    what: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|ADAPTER|MODEL|SAMPLES")] = None
    """A run's folder, an adapter's, a model's, a Hub id, `starter`, or a file of samples."""
    task: TaskName | None = None
    """What is asked, and how answers are graded; None takes the run's own held-out task."""
    compare: str | None = None
    """Evaluate this too, on the same rows with the same seeds, and compare: `base` (below the adapter), or anything
    that can be evaluated."""
    samples: Path | None = None
    """Grade this file instead of asking a model: JSON lines with `task_id` and `completion`, may be gzipped."""
    output_dir: Path | None = None
    """Folder of samples and report; None is evaluation/<task> of a run, else outputs/evaluation/<name>-<task>."""
    data: str | None = None
    """The task's rows: a JSON-lines file, may be gzipped, or a Hub data set id; None takes the run's, or the task's own
    on the Hub."""
    limit: int | None = None
    """Ask this many rows, drawn with the seed; None asks all, or as many as the run held out."""
    k: tuple[int, ...] | None = None
    """The k of pass@k; None is 1, and of a file of samples 1, 10 and 100 as far as there are samples."""
    num_samples: int | None = None
    """Completions of each row; None is the largest k."""
    temperature: float | None = None
    """Softmax temperature; 0 decodes greedily; None is 0 for one sample a row, else the run's, else 1."""
    top_p: float | None = None
    """Nucleus probability; None is the run's, else 1."""
    max_completion_tokens: int | None = None
    """Longest completion in tokens; None is the run's, else 512, or half the model's context."""
    style: StyleName | None = None
    """Answer format that is asked for and that GSM8K's strict rule looks for; None is the run's, `code` for programs,
    and else `xml`; of a file of GSM8K samples `hashes` (a last line `#### 18`), as the data set writes answers."""
    few_shot: int | None = None
    """Worked examples before each question, from the task's training rows; None is the run's, else 0."""
    few_shot_data: str | None = None
    """Where they come from, as `data`; None is the run's training rows, or the task's own on the Hub."""
    seed: int | None = None
    """Seed of rows, samples and intervals; None is the run's, else 0."""
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    """What draws completions. `auto`: vLLM where it and a GPU are there, else transformers."""
    bits: Literal[4, 16] | None = None
    """Precision of the weights: 4 (NF4, as adapters are trained here) or 16; None is the run's, else 16."""
    base: str | None = None
    """The base of an adapter, where it is no longer where the adapter says."""
    revision: str | None = None
    """Hub commit, branch or tag of the model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's repository."""
    sandbox: sandbox.Settings = field(default_factory=sandbox.Settings)
    """How programs are run."""

    @property
    def named(self) -> str:
        """What is evaluated, by whichever way it was named."""
        if self.what is not None and self.samples is not None:
            raise UserError(f"got both {self.what} and --samples {self.samples}; name one of them")
        if self.samples is not None:
            return str(self.samples)
        if self.what is None:
            raise UserError("nothing to evaluate; name a run, an adapter, a model, a Hub id or a file of samples")
        return self.what


def is_samples_file(name: str) -> bool:
    """Tell a file of samples from a model."""
    path = Path(name).expanduser()
    return path.is_file() or path.name.endswith((".jsonl", ".jsonl.gz"))


@dataclass(frozen=True)
class Plan:
    """How a model is asked: all that two evaluations must share to be compared."""

    data: DataConfig
    draws: Draws
    ks: tuple[int, ...]
    seed: int
    limits: sandbox.Settings
    trained_seed: int | None
    """The seed of the run whose settings these are, where it was trained on this data."""

    def told(self) -> dict[str, Any]:
        """Return what tells this protocol from any other, beside the rows."""
        return {
            "task": self.data.evaluation_task,
            "prompt_style": self.data.prompt_style,
            "few_shot": self.data.few_shot,
            "num_samples": self.draws.num_samples,
            "temperature": self.draws.temperature,
            "top_p": self.draws.top_p,
            "max_completion_tokens": self.draws.max_tokens,
            "seed": self.seed,
            "program_seconds": self.limits.timeout_seconds if runs_programs(self.data) else None,
            "program_mb": self.limits.memory_mb if runs_programs(self.data) else None,
        }


def protocol(options: Options, run: Mapping[str, Any] | None, context: int | None) -> Plan:
    """Work out how a model is asked.

    Args:
        options: the flags.
        run: run.json of the run it came from.
        context: the longest prompt and completion that the model takes.

    Raises:
        UserError: no task is named, or numbers do not go together.
    """
    settings = run["config"] if run else None
    own = DataConfig(**settings["data"]) if settings else None
    task = options.task or (own.evaluation_task if own else None)
    if task is None:
        raise UserError("--task is missing; expected gsm8k, humaneval, mbpp, starter or starter-code")
    if task == "prompts":
        raise UserError("the task `prompts` has no right answers to evaluate; name another --task")
    seed = options.seed if options.seed is not None else settings["seed"] if settings else 0
    trained = bool(own and own.evaluation_task == task and options.data in (None, own.eval))
    if own and trained:
        data = own
    else:
        style = own.prompt_style if own and own.prompt_style != "code" else "xml"
        data = DataConfig(task=task, prompt_style="code" if task in CODE_TASKS else style)
    changed: dict[str, Any] = {
        "eval": options.data,
        "eval_limit": options.limit,
        "prompt_style": options.style,
        "few_shot": options.few_shot,
        "train": options.few_shot_data,
    }
    if trained and options.few_shot_data and getattr(get_task(task), "ONE_SPLIT", False):
        raise UserError(
            f"--few-shot-data: the run was trained on {task} itself, and its own rows say what is left to ask"
        )
    data = dataclasses.replace(data, **{name: value for name, value in changed.items() if value is not None})
    longest = options.max_completion_tokens
    if longest is None and settings:
        longest = settings["sampling"]["max_completion_tokens"]
    if longest is None:
        longest = min(DEFAULT_MAX_TOKENS, (context or 2 * DEFAULT_MAX_TOKENS) // 2)
    ks = tuple(sorted(set((1,) if options.k is None else options.k)))
    trained_seed = settings["seed"] if settings and trained else None
    usual = settings["eval"] if settings and trained else {"temperature": 1.0, "top_p": 1.0}
    return Plan(data, _draws(options, ks, longest, usual), ks, seed, options.sandbox, trained_seed)


def _draws(options: Options, ks: tuple[int, ...], longest: int, usual: Mapping[str, Any]) -> Draws:
    check_ks(ks)
    num_samples = max(ks) if options.num_samples is None else options.num_samples
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if num_samples == 1 else usual["temperature"]
    top_p = usual["top_p"] if options.top_p is None else options.top_p
    if max(ks) > num_samples:
        raise UserError(f"--k {max(ks)} exceeds --num-samples {num_samples}; pass --num-samples {max(ks)}")
    if temperature == 0 and num_samples > 1:
        raise UserError(f"{num_samples} greedy samples of a row are all the same; pass --temperature 1")
    return Draws(num_samples, temperature, 1.0 if temperature == 0 else top_p, longest)


def check_numbers(options: Options) -> None:
    """Refuse numbers that mean nothing, whatever is evaluated.

    Raises:
        UserError: names the first.
    """
    given = options
    for word, value, fits, expected in (
        ("--num-samples", given.num_samples, lambda n: n >= 1, "at least 1"),
        ("--temperature", given.temperature, lambda t: 0 <= t < float("inf"), "0 or more"),
        ("--top-p", given.top_p, lambda p: 0 < p <= 1, "more than 0 and at most 1"),
        ("--max-completion-tokens", given.max_completion_tokens, lambda n: n >= 1, "at least 1"),
        ("--limit", given.limit, lambda n: n >= 1, "at least 1"),
        ("--few-shot", given.few_shot, lambda n: n >= 0, "0 or more"),
        ("--seed", given.seed, lambda n: 0 <= n < 2**32, f"0 to {2**32 - 1}"),
    ):
        if value is not None and not fits(value):
            raise UserError(f"{word} is {value}; expected {expected}")


def check_for_files(options: Options) -> None:
    """Refuse flags that say how a model is asked, where there are only files of samples.

    Raises:
        UserError: names the first.
    """
    for name in _FOR_MODELS:
        default = next(field.default for field in dataclasses.fields(Options) if field.name == name)
        if getattr(options, name) != default:
            raise UserError(f"{flag(name)} is for models, and {options.named} is a file of samples; leave it out")


def check_ks(ks: tuple[int, ...]) -> None:
    """Refuse a list of k that is empty or holds no number of samples.

    Raises:
        UserError: says what was given.
    """
    if not ks or min(ks) < 1:
        raise UserError(f"--k is {' '.join(map(str, ks)) or 'empty'}; expected whole numbers of at least 1")
