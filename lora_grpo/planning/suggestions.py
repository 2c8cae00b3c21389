"""Suggestions for a run that does not fit: its memory by part, and the three cheapest settings to change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_grpo.config import RunConfig, flag, micro_batches, replace
from lora_grpo.models import GIB
from lora_grpo.planning.fit import Planner

Suggestion = Mapping[str, Any]
"""Settings by dotted name: `{"model.bits": 4}`."""

_COUNT = 3
"""Number of settings to suggest in an error."""
_LEAST_TOKENS, _LEAST_RANK = 32, 4
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
    ladders.append([{"lora.rank": rank} for rank in _halves(config.lora.rank, _LEAST_RANK)])
    ladders.append([{"model.max_sequence_tokens": completion + short} for short in _halves(prompt, _LEAST_TOKENS)])
    ladders.append(
        [
            {"sampling.max_completion_tokens": short, "model.max_sequence_tokens": prompt + short}
            for short in _halves(completion, _LEAST_TOKENS)
        ]
    )
    return [ladder for ladder in ladders if ladder]


def as_flags(suggestion: Suggestion) -> str:
    """Format a suggestion as command-line flags."""
    return " ".join(
        f"no {flag(name)}" if value is None else flag(name) if value is True else f"{flag(name)} {value}"
        for name, value in suggestion.items()
    )


def changed(config: RunConfig, *suggestions: Suggestion) -> RunConfig:
    """Return the configuration with suggestions applied."""
    for name, value in itertools.chain.from_iterable(suggestion.items() for suggestion in suggestions):
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
    return (
        f"{config.model.name} does not fit on {device.name}: {phase} with a micro-batch of {least.micro_batch_size} "
        f"needs {sum(sizes.values()) / GIB:.2f} GiB ({by_part}), {device.usable / GIB:.2f} are usable "
        f"({device.free / GIB:.2f} of {device.total / GIB:.2f} are free); {_advice(planner, config)}"
    )


def _advice(planner: Planner, config: RunConfig) -> str:
    """Return three settings to change: single settings that are enough, else a combination."""
    if planner.device.on_cpu:  # the default micro-batch size on a CPU does not depend on the memory
        config = changed(config, {"train.micro_batch_size": planner.least(config).micro_batch_size})
    ladders = cheaper_settings(config, with_engine=planner.sampler in ("vllm", "shared"))

    def needed(*suggestions: Suggestion) -> float:
        return planner.least(changed(config, *suggestions)).needed / GIB

    def fits(*suggestions: Suggestion) -> bool:
        return planner.least(changed(config, *suggestions)).fits

    def describe(suggestion: Suggestion, verdict: str) -> str:
        return f"{as_flags(suggestion)} ({needed(suggestion):.2f} GiB, {verdict})"

    def also(named: Sequence[Suggestion]) -> str:
        names = set().union(*named)
        others = sorted((ladder[0] for ladder in ladders if not names & ladder[0].keys()), key=needed)
        more = others[: max(0, _COUNT - len(named))]
        return "".join(f"; also {describe(suggestion, 'not enough alone')}" for suggestion in more)

    alone = [first for ladder in ladders if (first := next(filter(fits, ladder), None))][:_COUNT]
    if alone:
        return f"cheapest first, pass {' or '.join(describe(each, 'enough') for each in alone)}{also(alone)}"
    if together := next((each for each in _combinations(ladders) if fits(*each)), None):
        parts = ", ".join(describe(each, "not enough alone") for each in together)
        return f"pass together ({needed(*together):.2f} GiB, enough): {parts}{also(together)}"
    return "pass a smaller --model.name"


def _combinations(ladders: Sequence[Sequence[Suggestion]]) -> Iterator[tuple[Suggestion, ...]]:
    """Yield combinations of two and three suggestions, ordered by mildest values, fewest settings, lowest cost."""
    for depth in range(max(map(len, ladders), default=0)):
        values = [ladder[min(depth, len(ladder) - 1)] for ladder in ladders]
        for count in range(2, _COUNT + 1):
            for chosen in itertools.combinations(values, count):
                if len(set().union(*chosen)) == sum(map(len, chosen)):  # no setting twice
                    yield chosen


def _halves(value: int, least: int) -> list[int]:
    """Return half of a value, a quarter, and so on, down to a minimum."""
    return [half for halvings in range(1, value.bit_length()) if (half := value >> halvings) >= least]
