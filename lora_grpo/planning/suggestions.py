"""What a run that does not fit its card is told: what it needs by part, and the three cheapest settings to change."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.config import RunConfig, flag, micro_batches
from lora_grpo.errors import UserError
from lora_grpo.models import GIB
from lora_grpo.planning.fit import Fit, Planner

Offer = Mapping[str, Any]
"""Settings by their dotted names: `{"model.bits": 4}`."""

OFFERED = 3
"""Settings that a refusal names."""
_LEAST_TOKENS, _LEAST_RANK = 32, 4
"""Below these a run learns next to nothing: a smaller model serves better."""


def fit(planner: Planner, config: RunConfig) -> Fit:
    """Return how a run uses its card; see `Planner.choose`.

    Raises:
        UserError: nothing fits; says what is needed by part, and three settings to change.
    """
    found = planner.choose(config)
    if found is None:
        raise UserError(refusal(planner, config))
    return found


def cheaper_settings(config: RunConfig, *, by_engine: bool = False) -> list[list[Offer]]:
    """Return settings that need less memory, the ones that cost least first, each with ever smaller values.

    First those that leave the result as it is and cost time, then those that change little, then what can be learned.

    Args:
        config: the run.
        by_engine: vLLM draws the completions; the kit's own sampler needs no weights of its own.
    """
    micro, sampling, longest = config.train.micro_batch_size, config.sampling, config.model.max_sequence_tokens
    completion, prompt = sampling.max_completion_tokens, longest - sampling.max_completion_tokens
    found: list[list[Offer]] = []
    if micro is not None:
        found.append([{"train.micro_batch_size": size} for size in micro_batches(config) if size < micro])
    if not config.train.gradient_checkpointing:
        found.append([{"train.gradient_checkpointing": True}])
    if by_engine and config.model.gpu_memory_share is not None:
        found.insert(0, [{"model.gpu_memory_share": None}])
    if by_engine:
        found.append([{"sampling.backend": "transformers"}])
    if "8bit" not in config.train.optimizer and config.train.optimizer != "sgd":
        found.append([{"train.optimizer": "adamw_8bit"}])
    if config.model.bits == 16:
        found.append([{"model.bits": 4}])
    found.append([{"lora.rank": rank} for rank in _halves(config.lora.rank, _LEAST_RANK)])
    found.append([{"model.max_sequence_tokens": completion + short} for short in _halves(prompt, _LEAST_TOKENS)])
    found.append(
        [
            {"sampling.max_completion_tokens": short, "model.max_sequence_tokens": prompt + short}
            for short in _halves(completion, _LEAST_TOKENS)
        ]
    )
    return [values for values in found if values]


def as_flags(offer: Offer) -> str:
    """Return an offer as it stands on a command line."""
    return " ".join(
        f"no {flag(name)}" if value is None else flag(name) if value is True else f"{flag(name)} {value}"
        for name, value in offer.items()
    )


def changed(config: RunConfig, *offers: Offer) -> RunConfig:
    """Return the configuration with offers taken."""
    for name, value in itertools.chain.from_iterable(offer.items() for offer in offers):
        section, _, key = name.partition(".")
        part = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def refusal(planner: Planner, config: RunConfig) -> str:
    """Say what the smallest plan needs by part, and the three cheapest changes: which of them is enough."""
    least = planner.least(config)
    phase, sizes = max(least.phases.items(), key=lambda item: sum(item[1].values()))
    told = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in sizes.items() if size)
    card = least.card
    return (
        f"{config.model.name} does not fit on {card.name}: {phase} with a micro-batch of {least.micro_batch_size} "
        f"needs {least.needed / GIB:.2f} GiB ({told}) of {card.usable / GIB:.2f} that can be used "
        f"({card.free / GIB:.2f} of {card.total / GIB:.2f} are free); {advice(planner, config)}"
    )


def advice(planner: Planner, config: RunConfig) -> str:
    """Name three settings: those that are enough alone, else those that are enough together, then the nearest."""
    if planner.card.on_cpu:  # where it is not named it does not depend on the memory
        config = changed(config, {"train.micro_batch_size": planner.least(config).micro_batch_size})
    ladders = cheaper_settings(config, by_engine=planner.sampler in ("vllm", "shared"))

    def needs(*offers: Offer) -> str:
        return f"{planner.least(changed(config, *offers)).needed / GIB:.2f} GiB"

    def short(offers: Sequence[Offer]) -> list[str]:
        return [f"{as_flags(offer)} ({needs(offer)}, not enough alone)" for offer in offers]

    def further(named: Sequence[Offer]) -> str:
        names = {name for offer in named for name in offer}
        others = [values[0] for values in ladders if not names & values[0].keys()]
        others.sort(key=lambda offer: planner.least(changed(config, offer)).needed)
        return "".join(f"; further {text}" for text in short(others[: max(0, OFFERED - len(named))]))

    firsts = [next((offer for offer in values if planner.accepts(changed(config, offer))), None) for values in ladders]
    if alone := [offer for offer in firsts if offer][:OFFERED]:
        enough = [f"{as_flags(offer)} ({needs(offer)}, enough)" for offer in alone]
        return f"cheapest first, pass {' or '.join(enough)}{further(alone)}"
    for together in _combinations(ladders):
        if planner.accepts(changed(config, *together)):
            told = f"{', '.join(short(together))}{further(together)}"
            return f"pass together, which needs {needs(*together)} and is enough: {told}"
    nearest = min(_combinations(ladders), key=lambda offers: planner.least(changed(config, *offers)).needed, default=())
    if not nearest:  # nothing is left that can be made smaller
        return "pass a smaller --model.name"
    told = ", ".join(map(as_flags, nearest))
    return f"not enough even together: {told} ({needs(*nearest)}); pass a smaller --model.name"


def _combinations(ladders: Sequence[Sequence[Offer]]) -> list[tuple[Offer, ...]]:
    """Return up to three offers together: mild values before harsh ones, few before many, cheap before dear."""
    found = []
    for depth in range(max(map(len, ladders), default=0)):
        values = [ladder[min(depth, len(ladder) - 1)] for ladder in ladders]
        for count in range(2, OFFERED + 1):
            found += [offers for offers in itertools.combinations(values, count) if not _overlap(offers)]
    return found


def _overlap(offers: Sequence[Offer]) -> bool:
    """Tell whether two offers change one setting."""
    return len(set().union(*offers)) < sum(map(len, offers))


def _halves(value: int, least: int) -> list[int]:
    """Return a value's halves, quarters, ... down to the least."""
    return [half for halvings in range(1, value.bit_length()) if (half := value >> halvings) >= least]
