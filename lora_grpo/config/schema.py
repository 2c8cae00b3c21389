"""The settings of a run: nested frozen dataclasses with a unit and a range for each field.

Flags, `--config` files and `run.json` use the same names: `train.max_steps` is `--train.max-steps` on the command line
and `{"train": {"max_steps": ...}}` in a file.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lora_grpo import distributed
from lora_grpo.errors import UserError, suggestion
from lora_grpo.flags import Flag, convert
from lora_grpo.sandbox import Settings as SandboxSettings

ConfigChanges = Mapping[str, Any]
"""Nested changes to a configuration: `{"train": {"max_steps": 60}, "seed": 1}`."""

STARTER = "starter"
"""Name of the bundled model, and of the preset that trains it on a CPU."""

SELF = "self"
"""The `teacher.name` of the model before training."""

MIN_VALIDATION_ROWS = 16
"""Minimum size of the validation set. A smaller one is too noisy to be useful."""

_STEPS_PER_HOUR = 10_800
"""More steps than any model trains in an hour."""
_COMMON_MULTIPLE = 840
"""Divisible by every `num_iterations` up to 8."""

UNUSED_BY_SFT = (
    "rewards",
    "grpo",
    "train.beta",
    "train.completions_steps",
    "sampling.num_generations",
    "data.filter_by_difficulty",
    "teacher.name",
    "teacher.weight",
    "teacher.reward_weight",
    "teacher.loss",
    "teacher.own_prompt",
    "teacher.bits",
)
"""Settings without effect on supervised fine-tuning, which has neither rollouts nor rewards."""

ResolvedBackend = Literal["vllm", "transformers"]
Backend = Literal["auto", ResolvedBackend]
"""The setting, which `auto` leaves to the machine."""
PromptStyle = Literal["xml", "hashes", "boxed", "think", "code"]
"""lora_grpo/prompts/styles.py has the system prompt of each."""

TeacherLoss = Literal["sampled", "reverse_kl", "forward_kl", "jsd"]
"""What a teacher is asked about each token: its logprob of the sampled token, or its whole distribution."""

Fraction = Annotated[float, Field(gt=0, le=1)]
LrScheduler = Literal["constant", "constant_with_warmup", "cosine", "inverse_sqrt", "linear", "polynomial"]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"]
Temperature = Annotated[float, Field(gt=0, le=10)]


@dataclass(frozen=True)
class ModelConfig:
    name: str = STARTER
    """Base model: `starter` (bundled), a folder, or a Hub id."""
    revision: str | None = None
    """Hub commit, branch or tag of the base model. By default, uses the latest commit and records it."""
    engine: Literal["auto", "peft", "unsloth"] = "auto"
    """Training engine: `peft` (transformers, bitsandbytes and PEFT) or `unsloth` (the same with faster kernels). `auto`
    selects unsloth if it is installed and a GPU is available, else peft, unless `check-gpu` measured otherwise."""
    bits: Literal["auto", 4, 16] = "auto"
    """Bits per weight of the frozen base model: 4 (bitsandbytes NF4, double-quantized) or 16. `auto` selects 16 on a
    GPU with room for them, into which an adapter is merged without more rounding, else 4; `--plan` says why."""
    max_sequence_tokens: Annotated[int, Field(ge=2)] = 1024
    """Maximum length of prompt plus completion, in tokens. Rows whose prompt leaves no room for the longest
    completion are dropped; their number is printed."""
    gpu_memory_share: Fraction | None = None
    """Fraction of the GPU's total memory for vLLM's weights and KV cache during training, above 0 and at most 1. None
    computes it from the completions of a step and the free memory."""
    trust_remote_code: bool = False
    """Allow running Python code from the model's repository."""
    chat_template: str | None = None
    """Chat template to use instead of the model's: the name of one that TRL contains, e.g. qwen2_5, or a Jinja file.
    For a model whose own template does not render tools."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the model's chat template as KEY=VALUE, e.g. enable_thinking=false. By default, a model with this
    switch thinks if max_completion_tokens is at least 2048."""

    @property
    def loaded_bits(self) -> Literal[4, 16]:
        """The bits with which the base is loaded. A run's plan replaces `auto`; without a plan, it means 4."""
        return 16 if self.bits == 16 else 4


@dataclass(frozen=True)
class LoraSettings:
    rank: PositiveInt = 16
    """Rank r of the update B·A."""
    alpha: PositiveInt = 32
    """Scaling numerator: the update is multiplied by alpha / rank, or alpha / sqrt(rank) with rslora."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's input during training."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Names of the modules to adapt, or `all-linear`."""
    rslora: bool = False
    """Use rank-stabilized scaling, alpha / sqrt(rank)."""
    dora: bool = False
    """Use DoRA (weight-decomposed LoRA), which also learns one magnitude per output row."""
    from_: Annotated[str | None, Field(alias="from")] = None
    """Run or PEFT adapter folder to continue from, e.g. after SFT. Its rank, alpha, targets, rslora and dora are used;
    the base must be the same. By default, starts from a new adapter."""


@dataclass(frozen=True)
class DataConfig:
    task: Annotated[str, Flag("--data.task", "--task")] = "starter"
    """Task of the training rows: your own file, such as my_task.py (see docs/your-task.md), or a name that `lora-grpo
    tasks` lists, such as `gsm8k`, `mbpp`, `math`, `starter` (bundled), `reasoning-gym:GENERATOR` or `textarena:GAME`.
    `--task` is short for this flag."""
    train: str | None = None
    """Training set: a JSON Lines, CSV or Parquet file, or a Hub dataset as owner/name, owner/name:config,
    owner/name@split or owner/name:config@split. By default, uses the task's own dataset."""
    eval: str | None = None
    """Evaluation set, in the formats of --data.train."""
    columns: tuple[str, ...] = ()
    """Other names of columns in `train` and `eval`, as NAME=COLUMN, e.g. question=problem answer=solution."""
    options: tuple[str, ...] = ()
    """Settings of a generator of reasoning-gym, as NAME=VALUE, e.g. min_numbers=3 or level=2."""
    train_limit: PositiveInt | None = None
    """Number of training rows, sampled with the run's seed. By default, uses all."""
    eval_limit: PositiveInt | None = None
    """Number of evaluation rows. By default, uses all."""
    prompt_style: PromptStyle = "xml"
    """Answer format requested in the system prompt: `xml`, `hashes` (####), `boxed` (LaTeX), `think`, or `code` (a
    fenced block)."""
    eval_task: str | None = None
    """Task of the evaluation rows if it differs, e.g. train on `mbpp` and evaluate on `humaneval`."""
    few_shot: NonNegativeInt = 0
    """Number of worked examples in the prompt. They are taken from the training rows and excluded from training."""
    filter_by_difficulty: bool = False
    """Train only on problems that the base model sometimes solves (0 < pass rate < 1). Before training, the base model
    answers each row num_generations times, until there are enough rows for max_steps."""

    @property
    def evaluation_task(self) -> str:
        return self.eval_task or self.task


@dataclass(frozen=True)
class SamplingConfig:
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Group size G: number of completions per prompt. GRPO compares their rewards with each other."""
    max_completion_tokens: PositiveInt = 256
    """Maximum length of a completion, in tokens; `completions/clipped_ratio` is the fraction that is truncated. In a
    conversation, all tokens after the prompt, of all turns and of the environment."""
    max_turn_tokens: PositiveInt | None = None
    """Maximum length of the model's turn in a conversation, in tokens. By default, the rest of
    max_completion_tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature of the training rollouts and of the validation set."""
    top_p: Fraction = 1.0
    """Nucleus sampling probability of the rollouts. 1 keeps the full distribution, as GRPO's gradient assumes."""
    backend: Backend = "auto"
    """Sampling backend: `vllm`, or `transformers` (the built-in sampler, which is faster on a CPU). `auto` selects vllm
    if it is installed and a GPU is available, else transformers."""
    server_url: str | None = None
    """URL of a vLLM server for sampling, on any machine, e.g. http://gpu2:8000; see docs/gpu-reference.md."""
    server_folder: str | None = None
    """Folder for each step's adapter, with the same path on this machine and on the server. By default, uses a
    temporary folder, which requires the server to run on this machine."""
    reproducible: bool = False
    """Make vLLM's LoRA kernels add in a fixed order on a GPU. By default, the order and therefore the rounding change
    from run to run."""
    engine_sleep: bool | None = None
    """Whether vLLM releases its GPU memory during training. By default, only if training does not fit beside it,
    because waking up takes time at every step."""


@dataclass(frozen=True)
class TrainConfig:
    max_steps: PositiveInt = 200
    """Number of optimizer steps."""
    prompts_per_step: PositiveInt = 8
    """Prompts per step. A GRPO step trains on prompts_per_step x num_generations completions, an SFT step on one
    reference answer per prompt."""
    micro_batch_size: PositiveInt | None = None
    """Completions per device in each forward and backward pass. By default, uses the largest size that fits in GPU
    memory, or at most 8 on a CPU. It affects rounding only, except with fields of TRL that need it: loss_type=bnpo,
    entropy_coef, use_adaptive_entropy and top_entropy_quantile."""
    learning_rate: Fraction = 2e-5
    """Peak learning rate."""
    lr_scheduler: LrScheduler = "constant_with_warmup"
    """Learning rate scheduler, by its name in transformers."""
    warmup_steps: NonNegativeInt = 5
    """Number of linear warmup steps."""
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL penalty against the model before training. With 0 there is no penalty, and `kl` is not
    logged."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2
    """Maximum gradient norm; larger gradients are scaled down."""
    optimizer: Optimizer = "adamw_torch"
    """Optimizer, by its name in transformers."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: uses less memory and takes about a third longer. By default, only on
    a GPU without room for all activations; `--plan` says why."""
    checkpoint_steps: PositiveInt = 20
    """Steps between checkpoints. If they take longer than 10 minutes, a checkpoint is also saved after 10 minutes."""
    keep_checkpoints: PositiveInt = 2
    """Number of most recent checkpoints to keep."""
    completions_steps: PositiveInt = 10
    """Save the completions and rewards of every Nth step in `completions/`. Completions that several steps use
    (num_iterations) are in the file of the first of these steps."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that also get the metrics, the final table and the report. One that fails does not end the run."""

    @property
    def schedule_spans_run(self) -> bool:
        """Whether the learning rate of every step depends on the number of steps, which therefore cannot change."""
        return not self.lr_scheduler.startswith("constant")


@dataclass(frozen=True)
class TeacherConfig:
    name: Annotated[str | None, Flag("--teacher.name", "--teacher")] = None
    """Teacher that scores each token that the model samples (on-policy distillation, see docs/distill.md): a run or an
    adapter, a model folder or Hub id, or `self`, the model before training, which reads `teacher_prompt(row)` of the
    task file. `--teacher` is short for this flag. By default, the run has no teacher."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Weight of the teacher: of logprob(teacher) - logprob(model) in the advantage of each token or, with another
    `teacher.loss` than `sampled`, of the divergence in the loss."""
    reward_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Weight of the rewards' advantage beside the teacher. With 0, the model learns only from the teacher, and rewards
    are only measured."""
    loss: TeacherLoss = "sampled"
    """How the model learns from the teacher. `sampled` uses the teacher's logprobs of the sampled tokens. The others
    compare whole distributions, which has less noise and needs more memory: `reverse_kl` KL(model || teacher),
    `forward_kl` KL(teacher || model), or `jsd`, the Jensen-Shannon divergence."""
    own_prompt: bool | None = None
    """Whether the teacher reads `teacher_prompt(row)` of the task file instead of the model's prompts. By default, only
    with `self`."""
    bits: Literal[4, 16] = 4
    """Bits per weight of a teacher with its own base. A teacher on the same base uses the bits of that base."""

    @property
    def reads_own_prompt(self) -> bool:
        """Whether the teacher reads other prompts than the model."""
        if self.name is None:
            return False
        return self.name == SELF if self.own_prompt is None else self.own_prompt


AlarmName = Literal[
    "nan", "logprob_mismatch", "policy_ratio", "collapse", "zero_variance", "entropy", "truncated", "hacking",
    "teacher_kl", "teacher_mistakes",
]  # fmt: skip


@dataclass(frozen=True)
class MonitorConfig:
    stop_on: tuple[AlarmName, ...] = ("nan", "logprob_mismatch", "policy_ratio", "collapse")
    """Alarms that end the run; the others print a warning. lora_grpo/monitoring/alarms.py defines each."""
    rows: NonNegativeInt = 64
    """Size of the validation set, which is split from the training rows: at least 16, and at most a tenth of the rows.
    0 disables validation."""
    every_steps: PositiveInt = 20
    """Steps between validation passes."""
    early_stopping: NonNegativeInt = 0
    """Stop after this many validation passes without a higher reward, and keep the best adapter. 0 never stops
    early."""


@dataclass(frozen=True)
class EvalConfig:
    num_samples: NonNegativeInt = 4
    """Samples per evaluation row for pass@k. 0 evaluates greedy decoding only."""
    k: tuple[PositiveInt, ...] = (1, 4)
    """Values of k in pass@k, each at most num_samples."""
    temperature: Temperature = 1.0
    """Sampling temperature. Greedy decoding is always evaluated as well."""
    top_p: Fraction = 1.0
    """Nucleus sampling probability."""
    also: tuple[str, ...] = ()
    """Other tasks to evaluate greedily before and after training, to see what else changed, e.g. ifeval humaneval."""
    also_limit: PositiveInt = 100
    """Number of rows of each of these tasks."""


@dataclass(frozen=True)
class RunConfig:
    preset: str = "auto"
    """Defaults for a GPU size, or `starter` for a machine without a GPU. `auto` detects the hardware."""
    method: Annotated[Literal["grpo", "sft"], Flag()] = "grpo"
    """GRPO, or supervised fine-tuning (SFT) on the task's reference answers. The recipe decides."""
    output_dir: str = ""
    """Folder of the run."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed for the adapter initialization, the order of prompts, the rollouts and the evaluation samples."""
    hours: Annotated[float, Field(ge=0.02, le=1_000, allow_inf_nan=False)] | None = None
    """Maximum hours of the whole run, e.g. 2 or 0.5, excluding the time between stop and --resume. Training uses the
    time that the evaluations leave. Without --train.max-steps, only the time limits the number of steps."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rewards: tuple[str, ...] = ("correct_answer",)
    """Rewards as NAME or NAME=WEIGHT; their weighted sum is the reward. Built in: correct_answer, passes_tests,
    share_of_tests_passed, right_equations, integer_answer, strict_xml_format, soft_xml_format, xml_tag_count,
    think_answer_format, coin_flip, pattern:REGEX, longer_is_better, near_length:200, cosine_scaled:1000,
    repetition_penalty:3, soft_overlong_punishment:1000,200. Use my_file.py:function for a function that a file of yours
    defines or imports."""
    train: TrainConfig = field(default_factory=TrainConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    grpo: tuple[str, ...] = ()
    """Any other field of TRL's GRPOConfig as KEY=VALUE, e.g. loss_type=dr_grpo."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir)

    @property
    def step_limit(self) -> int | None:
        """`train.max_steps`, or None if only `hours` limits the number of steps."""
        is_endless = self.hours is not None and self.train.max_steps == endless_steps(self.hours)
        return None if is_endless else self.train.max_steps

    @property
    def processes(self) -> int:
        """Number of processes that train, one per GPU. A launcher such as torchrun sets it; it is no setting."""
        return distributed.world_size()

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values, as in run.json; `--config` accepts them as JSON or YAML."""
        return json.loads(json.dumps(_as_dict(self)))  # lists instead of tuples


@dataclass(frozen=True)
class Invocation:
    """Actions of this command; not part of the run's settings."""

    dry_run: bool = False
    """Print the resolved settings, one rendered prompt and the rewards of its reference answer; train nothing."""
    plan: bool = False
    """Print the plan: a memory breakdown, the settings that fit, and the number of steps and tokens. Loads
    neither weights nor data."""
    preview: bool = False
    """Print the base model's answers to 8 prompts, their rewards, and whether GRPO can learn; train nothing."""
    audit: bool = False
    """Try to fool the task's check with wrong completions, and print which it accepts; loads no model."""
    resume: bool = False
    """Resume the run in the output folder from its newest complete checkpoint."""
    overwrite: bool = False
    """Delete the existing run in the output folder first."""


def endless_steps(hours: float) -> int:
    """Return a `train.max_steps` that no run reaches, for a run that only its hours limit."""
    multiples = math.ceil(hours * _STEPS_PER_HOUR / _COMMON_MULTIPLE)
    return multiples * _COMMON_MULTIPLE


def _as_dict(config: Any) -> dict[str, Any]:
    # A field named like a Python keyword, `from_`, ends with an underscore, which flags and files do not have.
    return dataclasses.asdict(config, dict_factory=lambda items: {name.rstrip("_"): value for name, value in items})


def replace(config: Any, changes: ConfigChanges, prefix: str = "") -> Any:
    """Return a copy of a nested frozen dataclass with nested changes applied. Only keys are checked."""
    attributes = {entry.name.rstrip("_"): entry.name for entry in dataclasses.fields(config)}
    values = {}
    for key, value in changes.items():
        name = f"{prefix}{key}"  # dotted, for messages
        if key not in attributes:
            known = [prefix + attribute for attribute in attributes]
            hint = suggestion(name, known, otherwise="the recipe's --help-all lists all")
            raise UserError(f"unknown key {name}; {hint}")
        attribute = attributes[key]
        section = getattr(config, attribute)
        if dataclasses.is_dataclass(section):
            if not isinstance(value, Mapping):
                raise UserError(f"{name} is {value!r}; expected a mapping of settings")
            value = replace(section, value, f"{name}.")
        values[attribute] = value
    return dataclasses.replace(config, **values)


def check_fields(config: Any) -> Any:
    """Return a configuration with every value converted to its field's type and checked against its range."""
    return convert(type(config), _as_dict(config))
