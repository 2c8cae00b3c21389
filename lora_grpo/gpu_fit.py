"""What a run asks of its GPU, worked out from the memory that is there: micro-batch, vLLM's share, sequences at once.

Before any weight is loaded: a run that cannot fit is refused with its parts, and what it chose is one line.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

from lora_grpo import base_model, ranks
from lora_grpo.backends import choose_engine, drawn_by
from lora_grpo.config import RunConfig, flag
from lora_grpo.config_check import batch_shape, micro_batches
from lora_grpo.errors import UserError
from lora_grpo.hardware import Gpu, nvidia_gpus
from lora_grpo.memory import GIB, Sampler, Step, parts, peak, phases
from lora_grpo.model_shape import Shape

DERIVED = ("train.micro_batch_size", "model.gpu_memory_share")
"""Settings that are worked out here where they are None; what the user names is taken as it is."""


USABLE_SHARE = 0.9
"""Of the free memory: the rest is for what a plan has wrong. A guess, until it is measured on a GPU."""


@dataclass(frozen=True)
class Card:
    """A GPU's memory in bytes, before this process has taken any of it."""

    name: str
    total: int
    free: int

    @property
    def usable(self) -> int:
        """What a plan may take of the free memory; see USABLE_SHARE."""
        return int(USABLE_SHARE * self.free)

    @classmethod
    def of(cls, gpu: Gpu) -> Card:
        return cls(gpu.name, int(gpu.memory_gib * GIB), int(gpu.free_gib * GIB))


@dataclass(frozen=True)
class Fit:
    """How a run uses a GPU."""

    micro_batch_size: int
    """Completions in one forward and backward pass."""
    gpu_memory_share: float | None
    """vLLM's `gpu_memory_utilization`: of the card's memory, or for Unsloth of what is free; None without vLLM."""
    max_model_len: int
    """Longest prompt and completion, in tokens."""
    max_num_seqs: int
    """Completions decoded at once."""
    sampler: Sampler
    sleeps: bool
    """A vLLM engine sleeps while the trainer trains."""
    parts: dict[str, int]
    """What `memory.parts` says of these numbers, in bytes."""
    card: Card

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        return phases(self.parts, sleeps=self.sleeps)

    @property
    def needed(self) -> int:
        """Bytes of the phase that needs most."""
        return max(sum(phase.values()) for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.card.usable

    def record(self) -> dict[str, Any]:
        """Return what run.json says of it, memory in GiB."""
        return {
            "gpu": self.card.name,
            "total_gib": _gib(self.card.total),
            "free_gib": _gib(self.card.free),
            "micro_batch_size": self.micro_batch_size,
            "gpu_memory_share": self.gpu_memory_share,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "sampler": self.sampler,
            "sleeps": self.sleeps,
            "planned_gib": {name: _gib(size) for name, size in self.parts.items() if size},
            "planned_phases_gib": {name: _gib(sum(phase.values())) for name, phase in self.phases.items()},
        }

    def line(self) -> str:
        """Say it in one line."""
        drawing, *training = (sum(phase.values()) / GIB for phase in self.phases.values())
        share = f", vLLM's share {self.gpu_memory_share:g}" if self.gpu_memory_share else ""
        text = (
            f"memory: micro-batch {self.micro_batch_size}, {self.max_num_seqs} completions at once{share}; planned "
            f"{max(training):.1f} GiB training, {drawing:.1f} GiB drawing, of {self.card.free / GIB:.1f} free"
        )
        return text if self.fits else f"{text}: TOO LITTLE for what your settings ask"


def fit_to_gpu(config: RunConfig) -> tuple[RunConfig, dict[str, Any] | None]:
    """Work out what was left open for the GPU of this machine, say it in one line, and return it.

    Without a GPU the configuration stays as it is.

    Args:
        config: the checked configuration.

    Returns:
        The configuration with nothing open, and what run.json says of the memory (None without a GPU).

    Raises:
        UserError: the run does not fit, or the model's configuration cannot be read.
    """
    gpus, _ = nvidia_gpus()
    if not gpus:
        return config, None
    idle = ("model.gpu_memory_share",) if drawn_by(config) == "transformers" else ()
    derived = [name for name in DERIVED if _value(config, name) is None and name not in idle]
    try:
        shape = Shape.of(base_model.read_config(config.model))
    except UserError as error:
        if derived:
            raise
        print(f"memory: not planned: {error}", file=sys.stderr)
        return config, None
    card = Card.of(gpus[0])
    if ranks.world_size() > 1:
        # Processes that start at different times find different amounts free, and have to come to the same numbers.
        card = dataclasses.replace(card, free=card.total)
    found = fit(shape, config, card, sampler=drawn_by(config), fused=choose_engine(config) == "unsloth")
    print(found.line(), file=sys.stderr)
    settled = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, micro_batch_size=found.micro_batch_size),
        model=dataclasses.replace(config.model, gpu_memory_share=found.gpu_memory_share),
    )
    return settled, {"derived": derived, **found.record()}


def fit(
    shape: Shape,
    config: RunConfig,
    card: Card,
    *,
    sampler: Sampler,
    fused: bool = False,
    sleeps: bool = True,
    world_size: int | None = None,
) -> Fit:
    """Choose the largest micro-batch that divides the step and fits, and as many completions at once as fit.

    Args:
        shape: of the model.
        config: the run; its `train.micro_batch_size` and `model.gpu_memory_share` are worked out where they are None.
        card: the GPU.
        sampler: what draws the completions.
        fused: Unsloth's kernels run the layers.
        sleeps: a vLLM engine sleeps while the trainer trains.
        world_size: processes that train together; None reads `WORLD_SIZE`.

    Raises:
        UserError: nothing fits; says what is needed by part, and three settings to change.
    """
    asked = config.train.micro_batch_size
    sizes = [asked] if asked is not None else micro_batches(config, world_size)
    shaped = batch_shape(config, world_size)
    most = shaped.accumulation_steps * shaped.micro_batch_size

    def planned(micro: int, sequences: int) -> Fit:
        found = parts(shape, step_of(config, micro, sequences, sampler, fused=fused))
        share = _share(found, card, sampler)
        return Fit(micro, share, config.model.max_sequence_tokens, sequences, sampler, sleeps, found, card)

    if config.model.gpu_memory_share is not None and sampler != "transformers":
        candidates = [_with_share(planned(micro, 1), config.model.gpu_memory_share, most) for micro in sizes]
    else:
        at_once = [most >> halvings for halvings in range(most.bit_length())]
        candidates = [planned(micro, sequences) for sequences in at_once for micro in sizes]
    fitting = [found for found in candidates if found.fits]
    if not fitting and asked is not None:  # what the user names is tried, and said to be too much
        fitting = [found for found in candidates if sum(found.phases["drawing"].values()) <= card.usable]
        fitting = fitting or candidates[-1:]
    if not fitting:
        raise UserError(_refusal(shape, config, candidates[-1], fused))
    # Where the engine sleeps each is the largest; where it does not, memory is shared between the two.
    return max(fitting, key=lambda found: (found.micro_batch_size * found.max_num_seqs, found.max_num_seqs))


def step_of(config: RunConfig, micro_batch_size: int, sequences: int, sampler: Sampler, *, fused: bool) -> Step:
    """Return a run's settings as `memory.parts` takes them."""
    completion = config.sampling.max_completion_tokens
    return Step(
        micro_batch_size=micro_batch_size,
        prompt_tokens=config.model.max_sequence_tokens - completion,
        completion_tokens=completion,
        sequences=sequences,
        sampler=sampler,
        bits=config.model.bits,
        rank=config.lora.rank,
        targets=config.lora.targets,
        dora=config.lora.dora,
        optimizer=config.train.optimizer,
        checkpointing=config.train.gradient_checkpointing,
        fused=fused,
    )


def cheaper_settings(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Return settings that need less memory, the ones that cost least first: what to pass, and the run with it."""
    found: list[tuple[str, RunConfig]] = []

    def offer(name: str, value: Any, text: str | None = None) -> None:
        section, _, key = name.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        found.append((text or f"{flag(name)} {value}", dataclasses.replace(config, **{section: changed})))

    if not config.train.gradient_checkpointing:
        offer("train.gradient_checkpointing", True, "--train.gradient-checkpointing")
    if config.model.bits == 16:
        offer("model.bits", 4)
    if "8bit" not in config.train.optimizer:
        offer("train.optimizer", "adamw_8bit")
    if config.sampling.max_completion_tokens > 1:
        shorter = config.sampling.max_completion_tokens // 2
        offer("sampling.max_completion_tokens", shorter)
        text, changed = found[-1]
        room = config.model.max_sequence_tokens - shorter
        model = dataclasses.replace(changed.model, max_sequence_tokens=room)
        found[-1] = (f"{text} --model.max-sequence-tokens {room}", dataclasses.replace(changed, model=model))
    if config.lora.rank > 1:
        offer("lora.rank", config.lora.rank // 2)
    return found


def _share(found: dict[str, int], card: Card, sampler: Sampler) -> float | None:
    """Return vLLM's `gpu_memory_utilization` for its parts, rounded up to a thousandth."""
    if sampler == "transformers":
        return None
    names = ("vllm_weights", "vllm_adapter", "vllm_workspace", "kv_cache")
    wanted = sum(found[name] for name in names) + (found["weights"] if sampler == "shared" else 0)
    # Unsloth multiplies by what is free (unsloth_zoo.vllm_utils.approximate_vllm_memory_usage), vLLM by all there is.
    of = card.free - found["context"] if sampler == "shared" else card.total
    return min(1.0, math.ceil(1000 * wanted / max(of, 1)) / 1000)


def _with_share(one: Fit, share: float, most: int) -> Fit:
    """Return a plan with the share that the user names: the engine fills it with its cache.

    Args:
        one: the plan for one completion at once.
        share: `gpu_memory_utilization`.
        most: completions of a step.
    """
    a_sequence = one.parts["kv_cache"]
    of = one.card.free - one.parts["context"] if one.sampler == "shared" else one.card.total
    rest = one.parts["vllm_weights"] + one.parts["vllm_adapter"] + one.parts["vllm_workspace"]
    rest += one.parts["weights"] if one.sampler == "shared" else 0
    cache = int(share * of) - rest
    if cache < a_sequence:
        raise UserError(
            f"--model.gpu-memory-share {share:g} leaves vLLM {max(cache, 0) / GIB:.2f} GiB for its cache, and one "
            f"completion takes {a_sequence / GIB:.2f}; leave the flag out, or pass "
            f"{min(1.0, math.ceil(100 * (rest + a_sequence) / of) / 100):g} or more"
        )
    return dataclasses.replace(
        one,
        gpu_memory_share=share,
        max_num_seqs=min(most, cache // a_sequence),
        parts={**one.parts, "kv_cache": cache},
    )


def _refusal(shape: Shape, config: RunConfig, least: Fit, fused: bool) -> str:
    """Say what the smallest plan needs and what to change."""
    phase, sizes = max(least.phases.items(), key=lambda item: sum(item[1].values()))
    told = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in sizes.items() if size)
    card, offers = least.card, []
    for text, changed in cheaper_settings(config):
        found = parts(shape, step_of(changed, least.micro_batch_size, least.max_num_seqs, least.sampler, fused=fused))
        offers.append((peak(found, sleeps=least.sleeps), text))
    # Those that would do, the cheapest first; then those that come nearest.
    enough = [offer for offer in offers if offer[0] <= card.usable]
    offers = [*enough, *sorted(set(offers) - set(enough))][:2]
    fixes = [f"{text} (needs {needed / GIB:.2f} GiB)" for needed, text in offers]
    return (
        f"{config.model.name} does not fit on {card.name}: {phase} with a micro-batch of {least.micro_batch_size} "
        f"needs {least.needed / GIB:.2f} GiB ({told}) of {card.usable / GIB:.2f} that can be used "
        f"({card.free / GIB:.2f} of {card.total / GIB:.2f} are free); in this order, pass {', '.join(fixes)}, "
        "or a smaller --model.name"
    )


def _value(config: RunConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _gib(size: int) -> float:
    return round(size / GIB, 3)
