"""How a run uses its GPU's memory, from what is there of it: micro-batch, vLLM's share, sequences at once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import RunConfig, batch_shape, hardware, micro_batches
from lora_grpo.errors import UserError
from lora_grpo.models import GIB, Shape, memory

USABLE_SHARE = 0.9
"""Of the free memory: the rest is for what a plan has wrong. A guess, until it is measured on a GPU."""


@dataclass(frozen=True)
class Card:
    """A GPU's memory in bytes, before this process has taken any of it; without a GPU the machine's own."""

    name: str
    total: int
    free: int
    on_cpu: bool = False

    @property
    def usable(self) -> int:
        """What a plan may take of the free memory; see USABLE_SHARE."""
        return int(USABLE_SHARE * self.free)

    @classmethod
    def of(cls, gpu: hardware.Gpu) -> Card:
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
    sampler: memory.SamplerKind
    sleeps: bool
    """A vLLM engine sleeps while the trainer trains."""
    parts: dict[str, int]
    """What `memory.parts` says of these numbers, in bytes."""
    card: Card

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        return memory.phases(self.parts, sleeps=self.sleeps)

    @property
    def needed(self) -> int:
        """Bytes of the phase that needs most."""
        return max(sum(phase.values()) for phase in self.phases.values())

    @property
    def drawing(self) -> int:
        """Bytes while completions are drawn."""
        return sum(self.phases["sampling"].values())

    @property
    def training(self) -> int:
        """Bytes of the larger of the two moments of a pass."""
        return max(sum(phase.values()) for name, phase in self.phases.items() if name != "sampling")

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


@dataclass(frozen=True)
class Planner:
    """What settings are planned for: a model on a card, with what trains and draws there."""

    shape: Shape
    card: Card
    sampler: memory.SamplerKind
    fused: bool = False
    """Unsloth's kernels run the layers."""
    sleeps: bool = True
    """A vLLM engine sleeps while the trainer trains."""
    world_size: int | None = None
    """Processes that train together; None reads `WORLD_SIZE`."""

    def at(self, config: RunConfig, micro: int, sequences: int) -> Fit:
        """Return the plan for a micro-batch and as many completions at once, whether it fits or not."""
        sampler = self._sampler(config)
        found = memory.parts(
            self.shape, step_of(config, micro, sequences, sampler, fused=self.fused, on_cpu=self.card.on_cpu)
        )
        share, longest = _share(found, self.card, sampler), config.model.max_sequence_tokens
        return Fit(micro, share, longest, sequences, sampler, self.sleeps, found, self.card)

    def candidates(self, config: RunConfig) -> list[Fit]:
        """Return the plans that may be chosen, the one that needs least last.

        Raises:
            UserError: the share that is named leaves vLLM no room for one completion.
        """
        most = self._completions(config)
        if self.card.on_cpu:  # the size of a pass is no question of memory there, and a step is decoded together
            return [self.at(config, batch_shape(config, self.world_size).micro_batch_size, most)]
        if self._fills_share(config):
            return [self._filling(config, micro) for micro in self._sizes(config)]
        at_once = [most >> halvings for halvings in range(most.bit_length())]
        return [self.at(config, micro, sequences) for sequences in at_once for micro in self._sizes(config)]

    def choose(self, config: RunConfig) -> Fit | None:
        """Return the largest micro-batch that divides the step and fits, with as many completions at once as fit.

        Args:
            config: the run; its `train.micro_batch_size` and `model.gpu_memory_share` are worked out where they are
                None, and taken as they are where they are named: a micro-batch though it be too much, if a smaller
                one fits.

        Returns:
            The plan; None where nothing fits.

        Raises:
            UserError: the share that is named leaves vLLM no room for one completion.
        """
        candidates = self.candidates(config)
        fitting = [found for found in candidates if found.fits]
        if not fitting and config.train.micro_batch_size is not None and self.smallest_fits(config):
            fitting = [found for found in candidates if found.drawing <= found.card.usable] or candidates[-1:]
        # Where the engine sleeps each is the largest; where it does not, memory is shared between the two.
        return max(
            fitting, key=lambda found: (found.micro_batch_size * found.max_num_seqs, found.max_num_seqs), default=None
        )

    def least(self, config: RunConfig) -> Fit:
        """Return the plan that needs least of those that may be chosen."""
        if self.card.on_cpu:
            return self.candidates(config)[-1]
        micro = self._sizes(config)[-1]
        return self._filling(config, micro) if self._fills_share(config) else self.at(config, micro, 1)

    def smallest_fits(self, config: RunConfig) -> bool:
        """Tell whether one completion a pass, and one at once, fits, whatever micro-batch is named."""
        return self.fits(config, 1, 1)

    def fits(self, config: RunConfig, micro: int, sequences: int) -> bool:
        """Tell whether a micro-batch fits with as many completions at once."""
        if self.card.on_cpu or not self._fills_share(config):
            return self.at(config, micro, sequences).fits
        try:
            found = self._filling(config, micro)
        except UserError:  # a share that is too small
            return False
        return found.fits and found.max_num_seqs >= sequences

    def accepts(self, config: RunConfig) -> bool:
        """Tell whether any plan fits."""
        try:
            return self.least(config).fits
        except UserError:  # a share that is too small
            return False

    def _sizes(self, config: RunConfig) -> list[int]:
        """Return the micro-batches that may be chosen, the smallest last."""
        asked = config.train.micro_batch_size
        return [asked] if asked is not None else micro_batches(config, self.world_size)

    def _completions(self, config: RunConfig) -> int:
        """Return the completions of a step, of one process."""
        shaped = batch_shape(config, self.world_size)
        return shaped.accumulation_steps * shaped.micro_batch_size

    def _fills_share(self, config: RunConfig) -> bool:
        return config.model.gpu_memory_share is not None and self._sampler(config) != "transformers"

    def _filling(self, config: RunConfig, micro: int) -> Fit:
        assert config.model.gpu_memory_share is not None
        return _with_share(self.at(config, micro, 1), config.model.gpu_memory_share, self._completions(config))

    def _sampler(self, config: RunConfig) -> memory.SamplerKind:
        """Return what draws, which an offer may have changed."""
        engine = self.sampler in ("vllm", "shared")
        return "transformers" if engine and config.sampling.backend == "transformers" else self.sampler


def step_of(
    config: RunConfig,
    micro_batch_size: int,
    sequences: int,
    sampler: memory.SamplerKind,
    *,
    fused: bool,
    on_cpu: bool = False,
) -> memory.Step:
    """Return a run's settings as `memory.parts` takes them."""
    completion = config.sampling.max_completion_tokens
    return memory.Step(
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
        on_cpu=on_cpu,
    )


def _share(found: dict[str, int], card: Card, sampler: memory.SamplerKind) -> float | None:
    """Return vLLM's `gpu_memory_utilization` for its parts, rounded up to a thousandth."""
    if sampler in ("transformers", "merged"):
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
        enough = math.ceil(100 * (rest + a_sequence) / of) / 100
        raise UserError(
            f"--model.gpu-memory-share {share:g} leaves vLLM {max(cache, 0) / GIB:.2f} GiB for its cache, and one "
            f"completion takes {a_sequence / GIB:.2f}; leave the flag out"
            + (f", or pass {enough:g} or more" if enough <= 1 else "")
        )
    return dataclasses.replace(
        one,
        gpu_memory_share=share,
        max_num_seqs=min(most, cache // a_sequence),
        parts={**one.parts, "kv_cache": cache},
    )


def _gib(size: int) -> float:
    return round(size / GIB, 3)
