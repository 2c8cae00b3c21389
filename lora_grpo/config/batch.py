"""The batch arithmetic of one optimizer step."""

import math
from dataclasses import dataclass

from lora_grpo import distributed
from lora_grpo.config.schema import RunConfig
from lora_grpo.errors import UserError

_CPU_MICRO_BATCH = 8
"""Largest default micro-batch size on a CPU, in completions."""


@dataclass(frozen=True)
class BatchShape:
    completions_per_step: int
    """prompts_per_step x num_generations, over all devices. SFT: prompts_per_step, each with its reference answer."""
    accumulation_steps: int
    """Forward and backward passes per optimizer step and device."""
    micro_batch_size: int
    """Completions per pass."""
    parallel_samples: int
    """Completions that one process samples at once: its part of a GRPO step, also in the evaluations of SFT."""


def batch_shape(config: RunConfig, world_size: int | None = None) -> BatchShape:
    """Split a step into micro-batches. The default number of processes is `WORLD_SIZE`, which launchers set."""
    world_size = world_size or distributed.world_size()
    sizes = micro_batches(config, world_size)
    micro = config.train.micro_batch_size or next(size for size in sizes if size <= _CPU_MICRO_BATCH)
    if micro not in sizes:
        nearest = min(sizes, key=lambda size: abs(size - micro))
        raise UserError(
            f"micro-batches of {micro} do not divide the {sizes[0] * world_size} completions of a step on {world_size} "
            f"processes; pass --train.micro-batch-size {nearest}, or change prompts per step or group size"
        )
    together = config.train.prompts_per_step * config.sampling.num_generations // world_size
    return BatchShape(sizes[0] * world_size, sizes[0] // micro, micro, together)


def micro_batches(config: RunConfig, world_size: int | None = None) -> list[int]:
    """Return every micro-batch size that divides a step, largest first; see `batch_shape`."""
    world_size = world_size or distributed.world_size()
    group = 1 if config.method == "sft" else config.sampling.num_generations
    share, rest = divmod(group * config.train.prompts_per_step, world_size)
    if rest:
        completions = f"{group * config.train.prompts_per_step} completions"
        raise UserError(f"{world_size} processes cannot share {completions} equally; change --train.prompts-per-step")
    return [size for size in range(share, 0, -1) if share % size == 0]


def prompts_to_read(micro_batch_size: int, group: int) -> int:
    """Return the largest number of distinct prompts in a micro-batch. A group may begin or end within it."""
    return -(-(micro_batch_size + group - math.gcd(micro_batch_size, group)) // group)
