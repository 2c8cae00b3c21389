"""What a run is asked to do: nested frozen dataclasses, each field with its unit.

Flags, `--config` files and `run.json` all speak these names: `train.max_steps` is `--train.max-steps` on the command
line and `{"train": {"max_steps": ...}}` in a file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lora_grpo.sandbox import Settings as SandboxSettings

STARTER = "starter"
"""The model name that means the embedded model; nothing is downloaded for it."""

MIN_VALIDATION_ROWS = 16
"""Fewer rows say too little to be held out of training."""


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
    gpu_memory_share: float | None = None
    """Share of GPU memory that vLLM may take for training rollouts (its weights and KV cache), 0 to 1; None works it
    out from the memory that is there."""
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
    filter_by_difficulty: bool = False
    """Train only on rows of middling difficulty: before training, the base answers each row num_generations times, and
    those stay that it gets right sometimes, not always. Rows are asked until max_steps have enough."""

    @property
    def evaluation_task(self) -> str:
        """The task of the held-out rows."""
        return self.eval_task or self.task


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
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    """What draws completions: `vllm` (the adapter beside a base that is loaded once) or `transformers` (the kit's own
    sampler). `auto`: vllm where it and a GPU are there, else transformers, which is faster on a CPU."""
    server_url: str | None = None
    """A vLLM server that draws them, on this or another machine, e.g. http://gpu2:8000; docs/several-gpus.md."""
    server_folder: str | None = None
    """Folder that this machine and the server's have under one path, for each step's adapter; None takes a temporary
    one, for a server on this machine."""


@dataclass(frozen=True)
class TrainConfig:
    max_steps: int = 200
    """Optimisation steps."""
    prompts_per_step: int = 8
    """Prompts in one step; a step trains on prompts_per_step x num_generations completions."""
    micro_batch_size: int | None = None
    """Completions in one forward and backward pass, per device; changes rounding alone. None takes the most that the
    GPU's memory holds, and on a CPU at most 8."""
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


AlarmName = Literal["nan", "logprob_mismatch", "collapse", "zero_variance", "entropy", "truncated", "hacking"]


@dataclass(frozen=True)
class MonitorConfig:
    stop_on: tuple[
        Literal["nan", "logprob_mismatch", "collapse", "zero_variance", "entropy", "truncated", "hacking"], ...
    ] = (
        "nan",
        "logprob_mismatch",
        "collapse",
    )
    """Watches that end the run when they fire; the others warn. What each looks at: lora_grpo/training/alarms.py."""
    rows: int = 64
    """Training rows, at least 16 and at most a tenth, that are kept out of training and asked again and again; 0 leaves
    that out."""
    every_steps: int = 20
    """Steps between asking them."""
    early_stopping: int = 0
    """Stop when so many passes over these rows brought no higher reward, and keep the adapter of the best one; 0 trains
    to the end."""


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
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
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
    plan: bool = False
    """Print the memory by part against the GPU's, what fits at most, steps, tokens and an estimated time, with each
    assumption, from the model's config.json alone; load no weights and no data."""
    preview: bool = False
    """Print what the base answers to 8 prompts, what that earns and whether GRPO can learn from it; train nothing."""
    resume: bool = False
    """Go on with the run in the output folder from its newest complete checkpoint."""
    overwrite: bool = False
    """Delete the run that is in the output folder first."""


def flag(name: str) -> str:
    """Return the command-line spelling of a dotted field name."""
    return "--" + name.replace("_", "-")
