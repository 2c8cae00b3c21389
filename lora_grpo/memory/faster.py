"""Chooses what takes memory to save time, if it is left open: a base in 16 bits, and no gradient checkpointing.

The options are tried in the order of `_options`, the fastest first. One is taken if the run then fits with room to
spare (ROOM), with a micro-batch that keeps the GPU busy and all completions of a step sampled in parallel. The last
option, which needs the least memory, is taken without room. What the user has set is in every option.
"""

from dataclasses import dataclass
from typing import Literal

from lora_grpo.config import RunConfig, replace
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.fit import ROOM, MemoryEstimate, Planner


@dataclass(frozen=True)
class Choice:
    """The settings of a run on a GPU, without open ones."""

    config: RunConfig
    estimate: MemoryEstimate | None
    """The batch sizes and their memory; None if the run does not fit."""
    line: str
    """What was chosen, and why."""


def choose(planner: Planner, config: RunConfig, *, can_be_16_bits: bool) -> Choice:
    """Return the fastest settings that fit with room, or those that need the least memory.

    Args:
        can_be_16_bits: whether the base can be loaded in 16 bits; False for a checkpoint that is quantized.
    """
    *faster_options, least = _options(config, can_be_16_bits=can_be_16_bits)
    if not faster_options:
        line = f"{_name(least)}, as set"
        if least.model.bits == 4 and not can_be_16_bits:
            line = f"{_name(least)}: the checkpoint is quantized, and checkpointing is as set"
        return Choice(least, planner.choose(least), line)

    rejected: list[RunConfig] = []
    for option in faster_options:
        estimate = planner.choose_with_room(option)
        if estimate:
            reason = f"the fastest, {_with_room(planner, estimate)}"
            if rejected:
                reason = _why_rejected(planner, rejected)
            return Choice(option, estimate, f"{_name(option)}: {reason}")
        rejected.append(option)
    return Choice(least, planner.choose(least), f"{_name(least)}: {_why_rejected(planner, rejected)}")


def with_least_memory(config: RunConfig) -> RunConfig:
    """Return the settings with the least memory for those that are left open. On a CPU, `on_cpu` has left none."""
    return _options(config, can_be_16_bits=False)[-1]


def on_cpu(config: RunConfig) -> RunConfig:
    """Return the settings on a CPU, without open ones."""
    return _resolved(config, config.model.loaded_bits, checkpointing=bool(config.train.gradient_checkpointing))


def _options(config: RunConfig, *, can_be_16_bits: bool) -> list[RunConfig]:
    """Return the settings to choose from: the fastest first, the one with the least memory last."""
    bits: list[Literal[4, 16]] = [16, 4] if can_be_16_bits else [4]
    if config.model.bits != "auto":
        bits = [config.model.bits]
    checkpointing = [False, True]
    if config.train.gradient_checkpointing is not None:
        checkpointing = [config.train.gradient_checkpointing]
    # The bits come first, because a base in 16 bits is also the one that the adapter is merged into.
    return [_resolved(config, each_bits, checkpointing=each) for each_bits in bits for each in checkpointing]


def _resolved(config: RunConfig, bits: Literal[4, 16], *, checkpointing: bool) -> RunConfig:
    return replace(config, {"model": {"bits": bits}, "train": {"gradient_checkpointing": checkpointing}})


def _name(option: RunConfig) -> str:
    checkpointing = "gradient checkpointing" if option.train.gradient_checkpointing else "no gradient checkpointing"
    return f"{option.model.bits} bits, {checkpointing}"


def _why_rejected(planner: Planner, rejected: list[RunConfig]) -> str:
    """Return why options were not taken, by the one that needs the least memory."""
    estimates = {_name(option): planner.smallest_fast(option) for option in rejected}
    name = min(estimates, key=lambda name: estimates[name].needed)
    estimate = estimates[name]
    if not estimate.host_fits:
        available = _gib(estimate.host_available or 0)
        return f"{name} would need {_gib(estimate.host_bytes)} of host memory, {available} are available"
    share = estimate.gpu_memory_share
    if share is not None and share < estimate.min_gpu_memory_share <= 1:
        return f"{name} would need --model.gpu-memory-share {estimate.min_gpu_memory_share:g}"
    return f"{name} would need {_with_room(planner, estimate)}"


def _with_room(planner: Planner, estimate: MemoryEstimate) -> str:
    return f"{_gib(estimate.taken)} and {ROOM / GIB:g} GiB to spare, {_gib(planner.device.usable)} are usable"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
