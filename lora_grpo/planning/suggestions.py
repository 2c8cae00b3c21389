"""The error of a run that does not fit: its memory by part, and the cheapest change of settings that makes it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.config import RunConfig, micro_batches, replace
from lora_grpo.flags import flag
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
    micro, completion = config.train.micro_batch_size, config.sampling.max_completion_tokens
    prompt = config.model.max_sequence_tokens - completion
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
    # Shorter prompts, shorter completions, then both.
    prompts, completions = _halves(prompt, _MIN_TOKENS), _halves(completion, _MIN_TOKENS)
    lengths = [(each, completion) for each in prompts] + [(prompt, each) for each in completions]
    ladders.append(
        [
            {"model.max_sequence_tokens": sum(pair)}
            | ({} if pair[1] == completion else {"sampling.max_completion_tokens": pair[1]})
            for pair in (*lengths, *zip(prompts, completions, strict=False))
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
        advice = f"{as_flags(*enough)} (needs {planner.least(_changed(config, *enough)).needed / GIB:.2f} GiB)"
    return (
        f"{config.model.name} does not fit on {device.name}: {phase} with a micro-batch of {least.micro_batch_size} "
        f"needs {sum(sizes.values()) / GIB:.2f} GiB ({by_part}), {device.usable / GIB:.2f} are usable "
        f"({device.free / GIB:.2f} of {device.total / GIB:.2f} are free); pass {advice}"
    )


def _cheapest(planner: Planner, config: RunConfig) -> Sequence[Suggestion]:
    """Return the cheapest change with which the run fits: one setting if one is enough; none if nothing is."""
    if planner.device.on_cpu:  # the default micro-batch size on a CPU does not depend on the memory
        config = _changed(config, {"train.micro_batch_size": planner.least(config).micro_batch_size})
    ladders = cheaper_settings(config, with_engine=planner.sampler in ("vllm", "shared"))

    def fits(*suggestions: Suggestion) -> bool:
        return planner.least(_changed(config, *suggestions)).fits

    for suggestion in (each for ladder in ladders for each in ladder):
        if fits(suggestion):
            return [suggestion]
    # Lower all settings as far as possible, then raise each as far as the run still fits, the costliest first.
    chosen = [ladder[-1:] for ladder in ladders]
    if not fits(*(each for [each] in chosen)):
        return []
    for place, ladder in reversed([*enumerate(ladders)]):
        for higher in ([], *([value] for value in ladder)):
            trial = [*chosen[:place], higher, *chosen[place + 1 :]]
            if fits(*(each for choice in trial for each in choice)):
                chosen = trial
                break
    return [each for choice in chosen for each in choice]


def _changed(config: RunConfig, *suggestions: Suggestion) -> RunConfig:
    for suggestion in suggestions:
        for name, value in suggestion.items():
            section, _, key = name.partition(".")
            config = replace(config, {section: {key: value}})
    return config


def _halves(value: int, least: int) -> list[int]:
    """Return half of a value, a quarter, and so on, down to a minimum."""
    return [half for halvings in range(1, value.bit_length()) if (half := value >> halvings) >= least]
