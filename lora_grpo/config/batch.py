"""The batch arithmetic of one optimizer step."""

import math
from dataclasses import dataclass

from lora_grpo.config.schema import RunConfig
from lora_grpo.config.trl_fields import field_of_micro_batches
from lora_grpo.errors import UserError

_CPU_MICRO_BATCH = 8
"""Largest default micro-batch size on a CPU, in completions."""


@dataclass(frozen=True)
class BatchShape:
    """How the completions of an optimizer step are processed."""

    completions_per_step: int
    """prompts_per_step x num_generations, over all devices. SFT: prompts_per_step, each with its reference answer."""
    accumulation_steps: int
    """Forward and backward passes per optimizer step and device."""
    micro_batch_size: int
    """Completions per pass."""
    parallel_samples: int
    """Completions that one process samples at once: its part of a GRPO step, also in the evaluations of SFT."""


def batch_shape(config: RunConfig) -> BatchShape:
    """Split a step into the micro-batches of each process."""
    sizes = micro_batches(config)  # largest first
    completions_per_process = sizes[0]
    completions_per_step = completions_per_process * config.processes

    default_size = next(size for size in sizes if size <= _CPU_MICRO_BATCH)
    micro_batch_size = config.train.micro_batch_size or default_size
    if micro_batch_size not in sizes:
        nearest = min(sizes, key=lambda size: abs(size - micro_batch_size))
        other_flags = "--train.prompts-per-step"
        if config.method == "grpo":
            other_flags += " or --sampling.num-generations"
        raise UserError(
            f"micro-batches of {micro_batch_size} do not divide the {completions_per_step} completions of a step on "
            f"{config.processes} processes; pass --train.micro-batch-size {nearest}, or change "
            f"{other_flags}"
        )

    sampled_per_step = config.train.prompts_per_step * config.sampling.num_generations  # also with SFT
    return BatchShape(
        completions_per_step=completions_per_step,
        accumulation_steps=completions_per_process // micro_batch_size,
        micro_batch_size=micro_batch_size,
        parallel_samples=sampled_per_step // config.processes,
    )


def micro_batches(config: RunConfig) -> list[int]:
    """Return every micro-batch size that divides a step, largest first; see `batch_shape`."""
    group = 1 if config.method == "sft" else config.sampling.num_generations
    completions = group * config.train.prompts_per_step
    per_process, rest = divmod(completions, config.processes)
    if rest:
        raise UserError(
            f"{config.processes} processes cannot share {completions} completions equally; change "
            "--train.prompts-per-step"
        )
    return [size for size in range(per_process, 0, -1) if per_process % size == 0]


def smaller_micro_batch(config: RunConfig) -> int | None:
    """Return the largest micro-batch size of at most half the present one with which a run may be resumed.

    It divides a step. None if the present one is 1, or if the loss depends on it.
    """
    if field_of_micro_batches(config.grpo):
        return None
    half = batch_shape(config).micro_batch_size // 2
    return max((size for size in micro_batches(config) if size <= half), default=None)


def prompts_to_read(micro_batch_size: int, group: int) -> int:
    """Return the largest number of distinct prompts in a micro-batch. A group may begin or end within it.

    A micro-batch begins at a multiple of its own size, so within a group it begins at a multiple of the greatest common
    divisor of both sizes. It reads the most prompts if it begins at the last of them: with groups of 6, micro-batches
    of 4 begin at completion 0, 4 or 2 of a group, and one that begins at 4 also reads the next prompt.
    """
    latest_start = group - math.gcd(micro_batch_size, group)
    return math.ceil((latest_start + micro_batch_size) / group)
