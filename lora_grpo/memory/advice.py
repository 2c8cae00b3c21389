"""The error message for a run that does not fit, with the cheapest change of settings that makes it fit.

The search, in two stages (`_cheapest_changes`): one setting alone, in the order of what it costs; then all settings as
low as they go, each raised again as far as the run still fits.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lora_grpo.config import RunConfig, micro_batches, replace
from lora_grpo.flags import flag
from lora_grpo.hardware import settings_of_vllm
from lora_grpo.memory.batches import MAX_BATCH_SIZE
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.fit import MemoryEstimate, Planner
from lora_grpo.memory.parameters import weight_bytes
from lora_grpo.memory.step import starts_vllm
from lora_grpo.runs import may_change

Change = Mapping[str, Any]
"""Settings by dotted name: `{"model.bits": 4}`."""

_MIN_TOKENS = 32
"""Shortest suggested prompt and completion. Below this or the next two minimums, a run learns very little, and a
smaller model is a better choice."""
_MIN_RANK = 4
_MIN_ROWS = 16
"""Fewest suggested rows of an evaluation."""


def refusal(planner: Planner, config: RunConfig, *, is_resumed: bool = False) -> str:
    """Return the error message for a run that does not fit: what it needs at least, and the flags to pass.

    Args:
        is_resumed: whether a run is resumed, so that only settings that may then change are named.
    """
    smallest = planner.smallest(config)
    share = config.model.gpu_memory_share
    if share is not None and smallest.min_gpu_memory_share > share:
        return (
            f"--model.gpu-memory-share {share:g} is too small: vLLM's weights and one completion need "
            f"{smallest.min_gpu_memory_share:g}; pass that, or leave the flag out"
        )
    advice = f"pass {_flags_to_pass(planner, config, is_resumed=is_resumed)}"
    if not is_resumed:
        advice = _smaller_teacher(planner, config) or advice
    if not smallest.host_fits:
        return (
            f"{config.model.name} needs {smallest.host_bytes / GIB:.2f} GiB of host memory for what leaves the GPU, "
            f"{(smallest.host_available or 0) / GIB:.2f} are available; close other programs, on WSL2 raise memory= in "
            f".wslconfig, or {advice}"
        )
    if _fits_without_other_programs(planner, config):
        advice = f"close other programs that use the {'memory' if planner.device.on_cpu else 'GPU'}, or {advice}"
    return f"{_largest_phase(smallest, config)}; {advice}"


def _smaller_teacher(planner: Planner, config: RunConfig) -> str:
    """Return which teacher fits, if the run fits without the second model that its teacher is; otherwise ""."""
    teacher = planner.teacher
    if teacher is None or teacher.own_bits is None:
        return ""
    without_teacher = dataclasses.replace(planner, teacher=None).smallest(config)
    if not without_teacher.fits:
        return ""
    adapter = f"an adapter of {config.model.name} as --teacher, which needs no second model"
    if teacher.own_bits == 16 and planner.smallest(_changed(config, [{"teacher.bits": 4}])).fits:
        return f"pass --teacher.bits 4, or {adapter}"
    room = without_teacher.device.usable - without_teacher.needed
    float_bytes = 4 if planner.device.on_cpu else 2
    bytes_per_parameter = weight_bytes(teacher.shape, 4, float_bytes=float_bytes) / teacher.shape.parameters
    billions = room / bytes_per_parameter / 1e9
    return (
        f"pass {adapter}, or a model with less than {room / GIB:.2f} GiB of weights (about {billions:.2g} billion "
        "parameters in 4 bits)"
    )


def memory_saving_options(planner: Planner, config: RunConfig, *, is_resumed: bool = False) -> list[list[Change]]:
    """Return changes that need less memory: a list for each setting, in which the memory decreases.

    Settings that only cost time come first, then those that hardly change the result, then those that limit learning.
    """
    options = _all_options(planner, config)
    if is_resumed:
        # A run keeps its settings, so none can be left out.
        options = [[change for change in changes if _may_follow(change, config)] for changes in options]
    return [changes for changes in options if changes]


def _may_follow(change: Change, config: RunConfig) -> bool:
    """Return whether a run may be resumed with a change."""
    return all(may_change(name, config) and value is not None for name, value in change.items())


def _all_options(planner: Planner, config: RunConfig) -> list[list[Change]]:
    completion = config.sampling.max_completion_tokens
    prompt = config.model.max_sequence_tokens - completion
    uses_vllm = starts_vllm(planner.sampler)
    options: list[list[Change]] = []

    # Settings that only cost time.
    if planner.device.on_cpu:  # an evaluation samples more completions at once than a step
        rows = _halves(config.data.eval_limit or MAX_BATCH_SIZE, _MIN_ROWS)
        options.append([{"data.eval_limit": limit} for limit in rows])
    if uses_vllm and config.model.gpu_memory_share is not None:
        options.append([{"model.gpu_memory_share": None}])
    if uses_vllm and config.sampling.engine_sleep is False:
        options.append([{"sampling.engine_sleep": True}])
    requested = config.train.micro_batch_size or 0
    smaller = [size for size in micro_batches(config) if size < requested]
    options.append([{"train.micro_batch_size": size} for size in smaller])
    if not config.train.gradient_checkpointing:
        options.append([{"train.gradient_checkpointing": True}])
    if uses_vllm and not settings_of_vllm(config):
        options.append([{"sampling.backend": "transformers"}])

    # Settings that hardly change the result.
    if "8bit" not in config.train.optimizer and config.train.optimizer != "sgd":
        options.append([{"train.optimizer": "adamw_8bit"}])
    if config.model.bits == 16:
        options.append([{"model.bits": 4}])
    if planner.teacher and planner.teacher.own_bits == 16:
        options.append([{"teacher.bits": 4}])
    if planner.teacher and config.teacher.loss != "sampled":
        options.append([{"teacher.loss": "sampled"}])

    # Settings that limit learning.
    if not config.lora.from_:  # its rank is that of the adapter
        options.append([{"lora.rank": rank} for rank in _halves(config.lora.rank, _MIN_RANK)])
    options.append(_shorter_rows(prompt, completion))
    return options


def _shorter_rows(prompt: int, completion: int) -> list[Change]:
    """Return limits with shorter prompts, then with shorter completions, then with both shorter."""
    prompts = _halves(prompt, _MIN_TOKENS)
    completions = _halves(completion, _MIN_TOKENS)
    changes: list[Change] = []
    for shorter_prompt in prompts:
        changes.append({"model.max_sequence_tokens": shorter_prompt + completion})
    for shorter_completion in completions:
        changes.append(_limits(prompt, shorter_completion))
    for shorter_prompt, shorter_completion in zip(prompts, completions, strict=False):
        changes.append(_limits(shorter_prompt, shorter_completion))
    return changes


def _limits(prompt: int, completion: int) -> Change:
    return {"sampling.max_completion_tokens": completion, "model.max_sequence_tokens": prompt + completion}


def _cheapest_changes(planner: Planner, config: RunConfig, *, is_resumed: bool) -> Sequence[Change]:
    """Return the cheapest changes with which the run fits, of one setting if possible; empty if it never fits."""
    if planner.device.on_cpu:
        # `memory_saving_options` suggests a smaller micro-batch only if a size is set. The default may be too large,
        # because it does not depend on the machine's memory, so it is set here.
        default_size = planner.smallest(config).micro_batch_size
        config = _changed(config, [{"train.micro_batch_size": default_size}])
    options = memory_saving_options(planner, config, is_resumed=is_resumed)

    def fits(changes: Iterable[Change | None]) -> bool:
        applied = [change for change in changes if change is not None]
        return planner.smallest(_changed(config, applied)).fits

    # One setting alone, the cheapest first.
    for changes_of_setting in options:
        for change in changes_of_setting:
            if fits([change]):
                return [change]

    # All settings as low as possible.
    chosen: list[Change | None] = [changes_of_setting[-1] for changes_of_setting in options]
    if not fits(chosen):
        return []

    # Then raise each setting as far as the run still fits, beginning with the most expensive change: to its requested
    # value (None: no change) or, if the run does not fit with that, to the highest value that fits.
    for index in reversed(range(len(options))):
        for higher in (None, *options[index]):
            trial = [*chosen[:index], higher, *chosen[index + 1 :]]
            if fits(trial):
                chosen = trial
                break
    return [change for change in chosen if change is not None]


def _flags_to_pass(planner: Planner, config: RunConfig, *, is_resumed: bool) -> str:
    """Return the flags of the cheapest changes with which the run fits, and the memory that it then needs."""
    changes = _cheapest_changes(planner, config, is_resumed=is_resumed)
    if not changes and is_resumed:
        return "another --output-dir, with settings that need less memory"
    if not changes:
        return "a smaller --model.name"
    flags = []
    for change in changes:
        for name, value in change.items():
            if value is None:
                flags.append(f"no {flag(name)}")
            elif value is True:
                flags.append(flag(name))
            else:
                flags.append(f"{flag(name)} {value}")
    needed = planner.smallest(_changed(config, changes)).needed
    return f"{' '.join(flags)} (needs {needed / GIB:.2f} GiB)"


def _fits_without_other_programs(planner: Planner, config: RunConfig) -> bool:
    """Return whether the run fits if all memory of the device is free."""
    empty_device = dataclasses.replace(planner.device, free=planner.device.total)
    return dataclasses.replace(planner, device=empty_device).smallest(config).fits


def _largest_phase(estimate: MemoryEstimate, config: RunConfig) -> str:
    """Return what does not fit: the phase with the highest demand, and its parts."""
    device = estimate.device
    phase, sizes = max(estimate.phases.items(), key=lambda item: sum(item[1].values()))
    by_part = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in sizes.items())
    return (
        f"{config.model.name} does not fit on {device.name}: {phase} with a micro-batch of {estimate.micro_batch_size} "
        f"and {estimate.max_num_seqs} completions in parallel needs {sum(sizes.values()) / GIB:.2f} GiB ({by_part}), "
        f"{device.usable / GIB:.2f} are usable ({device.free / GIB:.2f} of {device.total / GIB:.2f} are free)"
    )


def _changed(config: RunConfig, changes: Iterable[Change]) -> RunConfig:
    for change in changes:
        for name, value in change.items():
            section, _, key = name.partition(".")
            config = replace(config, {section: {key: value}})
    return config


def _halves(value: int, least: int) -> list[int]:
    """Return half of a value, a quarter, and so on, down to a minimum."""
    halves = []
    half = value // 2
    while half >= max(1, least):
        halves.append(half)
        half //= 2
    return halves
