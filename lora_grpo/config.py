"""What a run is asked to do: nested frozen dataclasses, each field with its unit, and the arithmetic that binds them.

Flags, `--config` files and `run.json` all speak these names: `train.max_steps` is `--train.max-steps` on the command
line and `{"train": {"max_steps": ...}}` in a file.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lora_grpo.errors import UserError
from lora_grpo.grpo_fields import check_name, parse_grpo_overrides
from lora_grpo.prompts import check_style
from lora_grpo.reward_registry import parse_reward_specs
from lora_grpo.rewards import TEST_REWARDS
from lora_grpo.sandbox import Settings as SandboxSettings
from lora_grpo.sandbox import check_settings
from lora_grpo.tasks import CODE_TASKS, get_task

STARTER = "starter"
"""The model name that means the embedded model; nothing is downloaded for it."""


@dataclass(frozen=True)
class ModelConfig:
    name: str = STARTER
    """Base model: `starter` (embedded), a folder, or a Hub id."""
    revision: str | None = None
    """Hub commit, branch or tag of the base model; None takes the newest and records its commit."""
    engine: Literal["auto", "peft", "unsloth"] = "auto"
    """`unsloth` patches the model for speed; `peft` is transformers + bitsandbytes + PEFT. `auto`: unsloth where a GPU
    and the package are present, else peft."""
    bits: Literal[4, 16] = 4
    """Precision of the frozen base weights: 4 (bitsandbytes NF4, double-quantised) or 16."""
    max_sequence_tokens: int = 1024
    """Longest prompt + completion, in tokens; rows whose prompt leaves no room are dropped and counted."""
    gpu_memory_share: float = 0.5
    """Share of GPU memory that Unsloth's vLLM may take (weights and KV cache), 0 to 1."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's repository."""


@dataclass(frozen=True)
class LoraSettings:
    rank: int = 16
    """Rank r of the update B·A."""
    alpha: int = 32
    """Scale numerator: the update is multiplied by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: float = 0.0
    """Dropout on the adapter's input during training, 0 to 1."""
    targets: tuple[str, ...] = ("all-linear",)
    """Module names that get an adapter, or `all-linear`."""
    rslora: bool = False
    """Rank-stabilised scale, alpha / sqrt(rank)."""
    dora: bool = False
    """Weight-decomposed LoRA: a learned magnitude per output row."""


@dataclass(frozen=True)
class DataConfig:
    task: str = "starter"
    """Where rows come from and how they are graded: `gsm8k`, `mbpp`, `humaneval`, `prompts` (no right answer), or the
    generated `starter` and `starter-code`."""
    train: str | None = None
    """Training rows: a .jsonl file or a Hub data set id; None takes the task's own source."""
    eval: str | None = None
    """Held-out rows, as `train`."""
    train_limit: int | None = None
    """Keep this many training rows, drawn with the run's seed; None keeps all."""
    eval_limit: int | None = None
    """Keep this many held-out rows; None keeps all."""
    prompt_style: str = "xml"
    """Answer format the system prompt asks for: `xml`, `hashes` (####), `think`, or `code` (a fenced block)."""
    eval_task: str | None = None
    """Task of the held-out rows, where it is another: train on `mbpp`, evaluate on `humaneval`."""
    few_shot: int = 0
    """Worked examples put before the question, taken from the training rows and not trained on."""

    @property
    def held_out_task(self) -> str:
        """The task of the held-out rows."""
        return self.eval_task or self.task

    @property
    def runs_programs(self) -> bool:
        """Whether grading runs what the model wrote."""
        return bool({self.task, self.held_out_task} & {*CODE_TASKS})


@dataclass(frozen=True)
class SamplingConfig:
    num_generations: int = 8
    """Group size G: completions per prompt whose rewards are compared with each other."""
    max_completion_tokens: int = 256
    """Longest completion in tokens; a longer one is truncated and counted in `completions/clipped_ratio`."""
    temperature: float = 1.0
    """Softmax temperature of training rollouts."""
    top_p: float = 1.0
    """Nucleus probability of training rollouts; 1 keeps the whole distribution, which GRPO's gradient assumes."""


@dataclass(frozen=True)
class TrainConfig:
    max_steps: int = 200
    """Optimisation steps."""
    prompts_per_step: int = 8
    """Prompts in one step; a step trains on prompts_per_step x num_generations completions."""
    micro_batch_size: int = 8
    """Completions in one forward and backward pass, per device; lower it when memory runs out."""
    learning_rate: float = 2e-5
    """Peak learning rate of the adapter."""
    lr_scheduler: str = "constant_with_warmup"
    """Name of a transformers learning-rate schedule."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    beta: float = 0.0
    """Weight of the KL penalty towards the base model; 0 leaves it out (and `kl` is then not logged)."""
    max_grad_norm: float = 0.2
    """Gradient norm above which gradients are scaled down."""
    optimizer: str = "adamw_torch"
    """Name of a transformers optimizer, e.g. adamw_torch or adamw_8bit."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    checkpoint_steps: int = 20
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest complete checkpoints that are kept."""
    completions_steps: int = 10
    """Steps between writing a few completions with their rewards to `completions/`."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Dashboards that get the metrics besides metrics.jsonl."""


@dataclass(frozen=True)
class EvalConfig:
    num_samples: int = 4
    """Samples per held-out row for pass@1 and pass@k; 0 leaves sampled evaluation out."""
    k: tuple[int, ...] = (1, 4)
    """The k of pass@k; each at most num_samples."""
    temperature: float = 1.0
    """Softmax temperature of the samples; greedy decoding is always evaluated besides."""
    top_p: float = 1.0
    """Nucleus probability of the samples."""
    batch_size: int = 256
    """Completions decoded at once."""


@dataclass(frozen=True)
class RunConfig:
    preset: str = "auto"
    """Defaults for a size of GPU, or `starter` for none; `auto` looks at the hardware."""
    output_dir: str = ""
    """Folder of the run; empty means outputs/<recipe>."""
    seed: int = 0
    """Seed of everything random: adapter, order of prompts, rollouts, evaluation samples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rewards: tuple[str, ...] = ("correct_answer",)
    """Rewards as NAME=SCALE, summed. Built in: correct_answer, passes_tests, share_of_tests_passed, integer_answer,
    strict_xml_format, soft_xml_format, xml_tag_count, think_answer_format, pattern:REGEX, longer_is_better,
    near_length:200; TRL's as trl:NAME; yours as my_file.py:function."""
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    grpo: tuple[str, ...] = ()
    """Any other GRPOConfig field as KEY=VALUE, e.g. epsilon_high=0.28."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON values; `--config` accepts it back."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Invocation:
    """How this call treats the run's folder; not part of what the run is."""

    dry_run: bool = False
    """Print the resolved configuration, one rendered prompt and the rewards of its gold answer; train nothing."""
    resume: bool = False
    """Go on with the run in the output folder from its newest complete checkpoint."""
    overwrite: bool = False
    """Delete the run that is in the output folder first."""


@dataclass(frozen=True)
class BatchShape:
    """How one optimisation step is cut up."""

    completions_per_step: int
    """prompts_per_step x num_generations, over all devices."""
    accumulation_steps: int
    """Forward and backward passes per optimisation step, per device."""


def batch_shape(config: RunConfig, world_size: int | None = None) -> BatchShape:
    """Work out the batch arithmetic of GRPO, or say which number does not fit.

    Args:
        config: the run.
        world_size: processes that train together; None reads `WORLD_SIZE`, which launchers set.

    Raises:
        UserError: a count is not positive, or completions per step cannot be cut into micro-batches.
    """
    if world_size is None:
        launched = os.environ.get("WORLD_SIZE", "1")
        if not launched.isdecimal() or int(launched) < 1:
            raise UserError(f"the environment has WORLD_SIZE={launched!r}; expected a number of processes, or unset it")
        world_size = int(launched)
    group, prompts, micro = (
        config.sampling.num_generations,
        config.train.prompts_per_step,
        config.train.micro_batch_size,
    )
    if group < 2:
        raise UserError(
            f"--sampling.num-generations is {group}; GRPO compares completions of one prompt with each other, "
            "so it must be at least 2 (8 is usual)"
        )
    _at_least(1, "train.prompts_per_step", prompts)
    _at_least(1, "train.micro_batch_size", micro)
    total = group * prompts
    if total % (micro * world_size):
        fits = [size for size in range(1, total // world_size + 1) if total % (size * world_size) == 0]
        if not fits:
            raise UserError(
                f"a step has {prompts} prompts x {group} generations = {total} completions, which {world_size} "
                "processes cannot share equally; change --train.prompts-per-step"
            )
        nearest = min(fits, key=lambda size: abs(size - micro))
        raise UserError(
            f"a step has {prompts} prompts x {group} generations = {total} completions, which micro-batches of {micro}"
            + (f" on {world_size} processes" if world_size > 1 else "")
            + f" do not divide; pass --train.micro-batch-size {nearest}, or change prompts per step or group size"
        )
    return BatchShape(completions_per_step=total, accumulation_steps=total // (micro * world_size))


def check(config: RunConfig) -> None:
    """Refuse every configuration that cannot run, before anything heavy is imported.

    Raises:
        UserError: names the flag, what it got, what was expected and the fix.
    """
    batch_shape(config)
    get_task(config.data.task)
    get_task(config.data.held_out_task)
    check_style(config.data.prompt_style)
    if config.data.prompt_style == "code" and not {config.data.task, config.data.held_out_task} <= {*CODE_TASKS}:
        raise UserError(
            f"--data.prompt-style code asks for a program; --data.task {config.data.task} wants another style, "
            "e.g. --data.prompt-style xml"
        )
    check_settings(config.sandbox)
    for spec in parse_reward_specs(config.rewards):
        if spec.name in TEST_REWARDS and config.data.task not in CODE_TASKS:
            raise UserError(
                f"--rewards {spec.name} runs unit tests, and --data.task {config.data.task} has none; "
                f"expected one of {', '.join(CODE_TASKS)}"
            )
    overrides = parse_grpo_overrides(config.grpo)
    check_name("--train.lr-scheduler", config.train.lr_scheduler, "trainer_utils.py", "SchedulerType")
    check_name("--train.optimizer", config.train.optimizer, "training_args.py", "OptimizerNames")
    for dashboard in config.train.report_to:
        if importlib.util.find_spec(dashboard) is None:
            raise UserError(f"--train.report-to {dashboard} needs that package; run `pip install {dashboard}`")
    iterations = overrides.get("num_iterations", 1)
    if iterations > 1 and config.train.max_steps % iterations:
        raise UserError(
            f"--train.max-steps {config.train.max_steps} is not a multiple of num_iterations={iterations}; "
            "the last rollouts would be used less often than the others"
        )
    if iterations > 1 and config.train.checkpoint_steps % iterations:
        raise UserError(
            f"--train.checkpoint-steps {config.train.checkpoint_steps} is not a multiple of num_iterations="
            f"{iterations}; a checkpoint between two uses of the same rollouts could not be resumed exactly"
        )
    for name, value, low in (
        ("model.max_sequence_tokens", config.model.max_sequence_tokens, 2),
        ("lora.rank", config.lora.rank, 1),
        ("lora.alpha", config.lora.alpha, 1),
        ("sampling.max_completion_tokens", config.sampling.max_completion_tokens, 1),
        ("train.max_steps", config.train.max_steps, 1),
        ("train.warmup_steps", config.train.warmup_steps, 0),
        ("train.checkpoint_steps", config.train.checkpoint_steps, 1),
        ("train.keep_checkpoints", config.train.keep_checkpoints, 1),
        ("train.completions_steps", config.train.completions_steps, 1),
        ("eval.num_samples", config.eval.num_samples, 0),
        ("eval.batch_size", config.eval.batch_size, 1),
        ("data.few_shot", config.data.few_shot, 0),
        ("data.train_limit", config.data.train_limit, 1),
        ("data.eval_limit", config.data.eval_limit, 1),
        ("seed", config.seed, 0),
    ):
        _at_least(low, name, value)
    if config.seed >= 2**32:
        raise UserError(f"--seed is {config.seed}; expected a number below 2**32")
    for name, number, low_open, high in (
        ("model.gpu_memory_share", config.model.gpu_memory_share, 0.0, 1.0),
        ("sampling.temperature", config.sampling.temperature, 0.0, 10.0),
        ("sampling.top_p", config.sampling.top_p, 0.0, 1.0),
        ("eval.temperature", config.eval.temperature, 0.0, 10.0),
        ("eval.top_p", config.eval.top_p, 0.0, 1.0),
        ("train.learning_rate", config.train.learning_rate, 0.0, 1.0),
        ("train.max_grad_norm", config.train.max_grad_norm, 0.0, float("inf")),
    ):
        if not low_open < number <= high:
            raise UserError(f"{flag(name)} is {number}; expected a number above {low_open:g} and at most {high:g}")
    if not 0 <= config.lora.dropout < 1:
        raise UserError(f"--lora.dropout is {config.lora.dropout}; expected a number from 0 to below 1")
    if not 0 <= config.train.beta < float("inf"):
        raise UserError(f"--train.beta is {config.train.beta}; expected 0 (no KL penalty) or more")
    if not config.lora.targets:
        raise UserError("--lora.targets is empty; pass all-linear, or names of modules such as q_proj v_proj")
    if config.sampling.max_completion_tokens >= config.model.max_sequence_tokens:
        raise UserError(
            f"--sampling.max-completion-tokens {config.sampling.max_completion_tokens} leaves no room for a prompt in "
            f"--model.max-sequence-tokens {config.model.max_sequence_tokens}; raise the second"
        )
    for k in config.eval.k if config.eval.num_samples else ():
        if not 1 <= k <= config.eval.num_samples:
            raise UserError(
                f"--eval.k {k} is not between 1 and num_samples={config.eval.num_samples}; pass --eval.num-samples {k}"
                if k > 0
                else f"--eval.k is {k}; expected 1 or more"
            )
    if config.data.train_limit and config.data.train_limit < config.train.prompts_per_step:
        raise UserError(
            f"--data.train-limit {config.data.train_limit} is fewer than --train.prompts-per-step "
            f"{config.train.prompts_per_step}; lower the second"
        )


def flag(name: str) -> str:
    """Return the command-line spelling of a dotted field name."""
    return "--" + name.replace("_", "-")


def _at_least(low: int, name: str, value: int | None) -> None:
    if value is not None and value < low:
        raise UserError(f"{flag(name)} is {value}; expected {low} or more")
