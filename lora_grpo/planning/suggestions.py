"""The error of a run that does not fit: its memory by part, and the cheapest change of settings that makes it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.config import RunConfig, flag, micro_batches, replace
from lora_grpo.models import GIB
from lora_grpo.planning.fit import Planner

Suggestion = Mapping[str, Any]
"""Settings by dotted name: `{"model.bits": 4}`."""

_MIN_TOKENS, _MIN_RANK = 32, 4
"""Lowest suggested values. Below them a run learns very little, and a smaller model is a better choice."""


def cheaper_settings(config: RunConfig, *, with_engine: bool = False) -> list[list[Suggestion]]:
    """Return settings that need less memory, each with decreasing values.

    Settings that only cost time come first, then those that hardly change the result, then those that limit learning.
    """
    micro, longest = config.train.micro_batch_size, config.model.max_sequence_tokens
    completion = config.sampling.max_completion_tokens
    prompt = longest - completion
    ladders: list[list[Suggestion]] = []
    if with_engine and config.model.gpu_memory_share is not None:
        ladders.append([{"model.gpu_memory_share": None}])
    if micro is not None:
        ladders.append([{"train.micro_batch_size": size} for size in micro_batches(config) if size < micro])
    if not config.train.gradient_checkpointing:
        ladders.append([{"train.gradient_checkpointing": True}])
    if with_engine:
        ladders.append([{"sampling.backend": "transformers"}])
    if "8bit" not in config.train.optimizer and config.train.optimizer != "sgd":
        ladders.append([{"train.optimizer": "adamw_8bit"}])
    if config.model.bits == 16:
        ladders.append([{"model.bits": 4}])
    ladders.append([{"lora.rank": rank} for rank in _halves(config.lora.rank, _MIN_RANK)])
    ladders.append([{"model.max_sequence_tokens": completion + short} for short in _halves(prompt, _MIN_TOKENS)])
    ladders.append(
        [
            {"sampling.max_completion_tokens": short, "model.max_sequence_tokens": prompt + short}
            for short in _halves(completion, _MIN_TOKENS)
        ]
    )
    return [ladder for ladder in ladders if ladder]


def as_flags(*suggestions: Suggestion) -> str:
    """Format suggestions as command-line flags."""
    return " ".join(
        f"no {flag(name)}" if value is None else flag(name) if value is True else f"{flag(name)} {value}"
        for suggestion in suggestions
        for name, value in suggestion.items()
    )


def changed(config: RunConfig, *suggestions: Suggestion) -> RunConfig:
    """Return the configuration with suggestions applied."""
    for suggestion in suggestions:
        for name, value in suggestion.items():
            section, _, key = name.partition(".")
            config = replace(config, {section: {key: value}})
    return config


def refusal(planner: Planner, config: RunConfig) -> str:
    """Return the error message for a run that does not fit: the smallest plan's memory by part, and what to change."""
    least, device = planner.least(config), planner.device
    share = config.model.gpu_memory_share
    if share is not None and least.least_share > share:
        return (
            f"--model.gpu-memory-share {share:g} is too small: vLLM's weights and one completion need "
            f"{least.least_share:g}; leave the flag out"
        )
    phase, sizes = max(least.phases.items(), key=lambda item: sum(item[1].values()))
    by_part = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in sizes.items() if size)
    enough = _cheapest(planner, config)
    advice = "a smaller --model.name"
    if enough:
        advice = f"{as_flags(*enough)} (needs {planner.least(changed(config, *enough)).needed / GIB:.2f} GiB)"
    return (
        f"{config.model.name} does not fit on {device.name}: {phase} with a micro-batch of {least.micro_batch_size} "
        f"needs {sum(sizes.values()) / GIB:.2f} GiB ({by_part}), {device.usable / GIB:.2f} are usable "
        f"({device.free / GIB:.2f} of {device.total / GIB:.2f} are free); pass {advice}"
    )


def _cheapest(planner: Planner, config: RunConfig) -> Sequence[Suggestion]:
    """Return the cheapest change with which the run fits: one setting if one is enough; () if nothing is."""
    if planner.device.on_cpu:  # the default micro-batch size on a CPU does not depend on the memory
        config = changed(config, {"train.micro_batch_size": planner.least(config).micro_batch_size})
    ladders = cheaper_settings(config, with_engine=planner.sampler in ("vllm", "shared"))

    def fits(*suggestions: Suggestion) -> bool:
        return planner.least(changed(config, *suggestions)).fits

    for suggestion in (each for ladder in ladders for each in ladder):
        if fits(suggestion):
            return (suggestion,)
    # Lower all settings step by step until the run fits, then take back those that are not needed, the costliest first.
    # Prompts and completions both change the context, so only one of them is lowered: prompts, unless that is too
    # little, which the second order tries.
    numbered = list(enumerate(ladders))
    for order in (numbered, numbered[::-1]):
        for depth in range(max(map(len, ladders), default=0)):
            chosen: dict[int, Suggestion] = {}
            for cost, ladder in order:
                suggestion = ladder[min(depth, len(ladder) - 1)]
                if not any(suggestion.keys() & other.keys() for other in chosen.values()):
                    chosen[cost] = suggestion
            if not fits(*chosen.values()):
                continue
            for cost in sorted(chosen, reverse=True):
                rest = {other: each for other, each in chosen.items() if other != cost}
                chosen = rest if fits(*rest.values()) else chosen
            return tuple(chosen[cost] for cost in sorted(chosen))
    return ()


def _halves(value: int, least: int) -> list[int]:
    """Return half of a value, a quarter, and so on, down to a minimum."""
    return [half for halvings in range(1, value.bit_length()) if (half := value >> halvings) >= least]
