"""What a configuration must be to run: the batch arithmetic, and every refusal before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import os

from lora_grpo import distributed
from lora_grpo.config import (
    MIN_VALIDATION_ROWS,
    RunConfig,
    at_least,
    batch_shape,
    check_name,
    flag,
    parse_grpo_overrides,
)
from lora_grpo.errors import UserError
from lora_grpo.rewards import TEST_REWARDS, parse_reward_specs
from lora_grpo.sandbox import check_settings
from lora_grpo.tasks import CODE_TASKS, UNGRADED_TASKS, chat, get_task, runs_programs


def check(config: RunConfig) -> None:
    """Refuse every configuration that cannot run, before anything heavy is imported.

    Raises:
        UserError: names the flag, what it got, what was expected and the fix.
    """
    batch_shape(config)
    _check_ranks(config)
    get_task(config.data.task)
    get_task(config.data.evaluation_task)
    chat.check_style(config.data.prompt_style)
    check_settings(config.sandbox)
    for spec in parse_reward_specs(config.rewards):
        if spec.name in TEST_REWARDS and config.data.task not in CODE_TASKS:
            raise UserError(
                f"--rewards {spec.name} runs unit tests, and --data.task {config.data.task} has none; "
                f"expected one of {', '.join(CODE_TASKS)}"
            )
    if config.data.filter_by_difficulty and config.data.task in UNGRADED_TASKS:
        raise UserError(
            f"--data.filter-by-difficulty keeps rows that are solved sometimes, and --data.task {config.data.task} "
            "has no right answers; leave it out, or pass a task that has, such as gsm8k"
        )
    if config.data.prompt_style == "code" and not {config.data.task, config.data.evaluation_task} <= {*CODE_TASKS}:
        raise UserError(
            f"--data.prompt-style code asks for a program; --data.task {config.data.task} wants another style, "
            "e.g. --data.prompt-style xml"
        )
    if config.data.prompt_style == "hashes" and runs_programs(config.data):
        raise UserError("--data.prompt-style hashes asks for a number; pass --data.prompt-style code for programs")
    if config.lora.dora and (config.sampling.backend == "vllm" or config.sampling.server_url):
        raise UserError("--lora.dora is not served by vLLM; pass --sampling.backend transformers")
    if (url := config.sampling.server_url) is not None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--sampling.server-url {url} is no address; expected one such as http://gpu2:8000")
        if config.sampling.backend == "transformers":
            raise UserError("--sampling.server-url is a vLLM server; leave --sampling.backend transformers out")
        if config.model.engine == "unsloth":
            raise UserError("--sampling.server-url goes with --model.engine peft; Unsloth draws its own rollouts")
    elif config.sampling.server_folder is not None:
        raise UserError("--sampling.server-folder is given without --sampling.server-url")
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
    if 0 < config.monitor.rows < MIN_VALIDATION_ROWS:
        raise UserError(
            f"--monitor.rows {config.monitor.rows} says too little; pass {MIN_VALIDATION_ROWS} or more, or 0 for none"
        )
    if config.monitor.early_stopping and not config.monitor.rows:
        raise UserError("--monitor.early-stopping goes by held-out rows; leave --monitor.rows 0 out")
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
        ("monitor.rows", config.monitor.rows, 0),
        ("monitor.every_steps", config.monitor.every_steps, 1),
        ("monitor.early_stopping", config.monitor.early_stopping, 0),
        ("eval.num_samples", config.eval.num_samples, 0),
        ("data.few_shot", config.data.few_shot, 0),
        ("data.train_limit", config.data.train_limit, 1),
        ("data.eval_limit", config.data.eval_limit, 1),
        ("seed", config.seed, 0),
    ):
        at_least(low, name, value)
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
        if number is not None and not low_open < number <= high:
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


def _check_ranks(config: RunConfig) -> None:
    """Refuse several processes where each does not hold the whole model: each samples by itself."""
    if distributed.world_size() > 1 and config.model.engine == "unsloth":
        raise UserError(
            f"--model.engine unsloth trains in one process, and {distributed.world_size()} were started; "
            "pass --model.engine peft, or start one"
        )
    sharded = [name for name in ("FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG") if _is_on(f"ACCELERATE_USE_{name}")]
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    if _is_on("ACCELERATE_USE_DEEPSPEED") and stage not in ("0", "1", "2"):
        sharded.append(f"DeepSpeed ZeRO-{stage}")
    sharded += sorted({"fsdp", "deepspeed", "parallelism_config"} & parse_grpo_overrides(config.grpo).keys())
    if sharded:
        raise UserError(
            f"{sharded[0]} spreads the model over processes, and here each samples from a whole one; launch without it "
            "(docs/several-gpus.md says what to do with a model too large for one GPU)"
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")
