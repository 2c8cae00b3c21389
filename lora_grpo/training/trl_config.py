"""The arguments of TRL's GRPOConfig and SFTConfig, derived from a run's configuration."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import RunConfig, batch_shape, typed_grpo_overrides
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models import base_model


@contextlib.contextmanager
def naming_overrides(
    config: RunConfig, kind: type[UserError | RunError], has_worked: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Name the fields of `--grpo` if TRL fails in a `with` block. Their types are checked, but not what they do.

    Args:
        has_worked: whether TRL has done a step with these fields, so that a later error has another cause.

    Raises:
        UserError or RunError, as `kind` says: an error of another package, in a run with `--grpo`. The error itself is
            raised if TRL has worked, or if it follows from the error of another process.
    """
    import torch

    try:
        yield
    except (UserError, RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not config.grpo or has_worked() or distributed.reported_error():
            raise
        raise kind(
            f"TRL fails with --grpo {' '.join(config.grpo)} ({type(error).__name__}: {first_line(error)}); leave out "
            "the field that it does not support"
        ) from error


def grpo_arguments(config: RunConfig, folder: Path, reward_weights: list[float]) -> dict[str, Any]:
    """Return the GRPOConfig arguments of a run.

    All are explicit, because TRL's defaults change between versions and Unsloth's patched GRPOConfig has different ones
    (learning rate 5e-5, 8-bit AdamW, importance sampling correction off, another clipping range).
    """
    sampling = config.sampling
    overrides = typed_grpo_overrides(config.grpo)
    return {
        **_arguments(config, folder),
        "steps_per_generation": batch_shape(config).accumulation_steps,
        "num_generations": sampling.num_generations,
        "max_completion_length": sampling.max_completion_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "beta": config.train.beta,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": overrides.get("epsilon", 0.2),  # TRL's default; Unsloth's is 0.28
        "num_iterations": 1,
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",  # docs/decisions/0026-importance-sampling.md
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_mode": "colocate",
        "mask_truncated_completions": False,
        # By default, TRL takes the model's coefficient, and Unsloth 0. Routers are frozen, and their loss would need
        # the full logits of padded rows.
        "router_aux_loss_coef": 0.0,
        "reward_weights": reward_weights,
        "log_completions": False,
        **overrides,
    }


def sft_arguments(config: RunConfig, folder: Path, loss_type: str) -> dict[str, Any]:
    """Return the SFTConfig arguments of a run. All are explicit, as in `grpo_arguments`."""
    return {
        **_arguments(config, folder),
        "train_sampling_strategy": "sequential",
        "loss_type": loss_type,
        "max_length": None,  # never truncate; fit_data has dropped longer rows
        "packing": False,
        "padding_free": False,
    }


def _arguments(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments that both methods share."""
    import torch

    shape = batch_shape(config)
    settings = config.train
    dtype = base_model.compute_dtype()
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(folder),
        "max_steps": settings.max_steps,
        "per_device_train_batch_size": shape.micro_batch_size,
        "gradient_accumulation_steps": shape.accumulation_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.lr_scheduler,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": 0.0,
        "optim": settings.optimizer,
        "max_grad_norm": settings.max_grad_norm,
        # prompt_order decides the order of rows.
        "shuffle_dataset": False,
        _checkpointing_field(): bool(settings.gradient_checkpointing),
        "bf16": on_gpu and dtype == torch.bfloat16,
        "fp16": on_gpu and dtype == torch.float16,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        # Otherwise DDP rebuilds its buckets after the first step, including the first step of a resumed run. With more
        # than two ranks, gradients would then be summed in a different order than in an uninterrupted run.
        "ddp_find_unused_parameters": True,
        "seed": config.seed,
        "save_strategy": "steps",
        "save_steps": settings.checkpoint_steps,
        "logging_strategy": "steps",
        "logging_steps": 1,
        # By default, transformers logs the mean of the other losses in place of NaN, which no alarm would notice.
        "logging_nan_inf_filter": False,
        "report_to": [],  # see `Trackers`
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def _checkpointing_field() -> str:
    """Return the name of the field that enables gradient checkpointing. transformers 5.24 renamed it.

    The old name still exists as an alias, which TRL sets by default, and which is deprecated.
    """
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    return "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
