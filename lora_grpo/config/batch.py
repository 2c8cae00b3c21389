"""The batch arithmetic of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from lora_grpo import distributed
from lora_grpo.config.schema import RunConfig
from lora_grpo.errors import UserError

_CPU_MICRO_BATCH = 8
"""Largest default micro-batch size on a CPU, in completions."""


@dataclass(frozen=True)
class BatchShape:
    """How an optimizer step is split."""

    completions_per_step: int
    """prompts_per_step x num_generations, over all devices."""
    accumulation_steps: int
    """Forward and backward passes per optimizer step and device."""
    micro_batch_size: int
    """Completions per pass."""


def batch_shape(config: RunConfig, world_size: int | None = None) -> BatchShape:
    """Split a step into micro-batches.

    Args:
        config: the run.
        world_size: number of training processes; None reads `WORLD_SIZE`, which launchers set.

    Raises:
        UserError: the completions of a step are not divisible by the number of processes or by the micro-batch size.
    """
    world_size = distributed.world_size() if world_size is None else world_size
    sizes = micro_batches(config, world_size)
    micro = config.train.micro_batch_size or next(size for size in sizes if size <= _CPU_MICRO_BATCH)
    if micro not in sizes:
        nearest = min(reversed(sizes), key=lambda size: abs(size - micro))
        raise UserError(
            f"micro-batches of {micro} do not divide {_describe_step(config)}"
            + (f" on {world_size} processes" if world_size > 1 else "")
            + f"; pass --train.micro-batch-size {nearest}, or change prompts per step or group size"
        )
    return BatchShape(sizes[0] * world_size, sizes[0] // micro, micro)


def micro_batches(config: RunConfig, world_size: int | None = None) -> list[int]:
    """Return every micro-batch size that divides a step, largest first. The arguments are those of `batch_shape`.

    Raises:
        UserError: the processes cannot share a step equally.
    """
    world_size = distributed.world_size() if world_size is None else world_size
    share, rest = divmod(config.sampling.num_generations * config.train.prompts_per_step, world_size)
    if rest:
        raise UserError(
            f"{world_size} processes cannot share {_describe_step(config)} equally; change --train.prompts-per-step"
        )
    return [size for size in range(share, 0, -1) if share % size == 0]


def _describe_step(config: RunConfig) -> str:
    group, prompts = config.sampling.num_generations, config.train.prompts_per_step
    return f"a step of {prompts} prompts x {group} generations = {group * prompts} completions"
