"""The batch arithmetic of one optimization step."""

from __future__ import annotations

from dataclasses import dataclass

from lora_grpo import distributed
from lora_grpo.config.schema import RunConfig, flag
from lora_grpo.errors import UserError


@dataclass(frozen=True)
class BatchShape:
    """How one optimisation step is cut up."""

    completions_per_step: int
    """prompts_per_step x num_generations, over all devices."""
    accumulation_steps: int
    """Forward and backward passes per optimisation step, per device."""
    micro_batch_size: int
    """Completions in one of these passes."""


_CPU_MICRO_BATCH = 8
"""At most this many completions in one pass where neither the user nor a GPU's memory says how many."""


def batch_shape(config: RunConfig, world_size: int | None = None) -> BatchShape:
    """Work out the batch arithmetic of GRPO, or say which number does not fit.

    Args:
        config: the run.
        world_size: processes that train together; None reads `WORLD_SIZE`, which launchers set.

    Raises:
        UserError: a count is not positive, or completions per step cannot be cut into micro-batches.
    """
    world_size = distributed.world_size() if world_size is None else world_size
    sizes = micro_batches(config, world_size)
    group, prompts = config.sampling.num_generations, config.train.prompts_per_step
    micro = config.train.micro_batch_size
    if micro is None:
        micro = next(size for size in sizes if size <= _CPU_MICRO_BATCH)
    at_least(1, "train.micro_batch_size", micro)
    total = group * prompts
    if micro not in sizes:
        nearest = min(reversed(sizes), key=lambda size: abs(size - micro))
        raise UserError(
            f"a step has {prompts} prompts x {group} generations = {total} completions, which micro-batches of {micro}"
            + (f" on {world_size} processes" if world_size > 1 else "")
            + f" do not divide; pass --train.micro-batch-size {nearest}, or change prompts per step or group size"
        )
    return BatchShape(total, total // (micro * world_size), micro)


def micro_batches(config: RunConfig, world_size: int | None = None) -> list[int]:
    """Return every size of micro-batch that divides a step, the largest first; arguments are those of `batch_shape`.

    Raises:
        UserError: a count is not positive, or the processes cannot share a step equally.
    """
    world_size = distributed.world_size() if world_size is None else world_size
    group, prompts = config.sampling.num_generations, config.train.prompts_per_step
    if group < 2:
        raise UserError(
            f"--sampling.num-generations is {group}; GRPO compares completions of one prompt with each other, "
            "so it must be at least 2 (8 is usual)"
        )
    at_least(1, "train.prompts_per_step", prompts)
    total = group * prompts
    if total % world_size:
        raise UserError(
            f"a step has {prompts} prompts x {group} generations = {total} completions, which {world_size} "
            "processes cannot share equally; change --train.prompts-per-step"
        )
    each = total // world_size
    return [size for size in range(each, 0, -1) if each % size == 0]


def at_least(low: int, name: str, value: int | None) -> None:
    if value is not None and value < low:
        raise UserError(f"{flag(name)} is {value}; expected {low} or more")
