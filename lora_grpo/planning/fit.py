"""Plans how a run uses a device's memory: micro-batch size, parallel completions, and vLLM's memory share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import RunConfig, batch_shape, hardware, micro_batches
from lora_grpo.errors import UserError
from lora_grpo.models import GIB, Shape, memory

USABLE_SHARE = 0.9
"""Share of the free memory that a plan may use; the rest is a safety margin. A guess, not measured on a GPU."""


@dataclass(frozen=True)
class Device:
    """The memory of a GPU in bytes, before this process uses any. Without a GPU, the memory of the machine."""

    name: str
    total: int
    free: int
    on_cpu: bool = False

    @property
    def usable(self) -> int:
        """Memory that a plan may use; see USABLE_SHARE."""
        return int(USABLE_SHARE * self.free)

    @classmethod
    def of(cls, gpu: hardware.Gpu) -> Device:
        return cls(gpu.name, int(gpu.memory_gib * GIB), int(gpu.free_gib * GIB))


@dataclass(frozen=True)
class Fit:
    """How a run uses the memory of a device."""

    micro_batch_size: int
    """Completions per forward and backward pass."""
    gpu_memory_share: float | None
    """vLLM's `gpu_memory_utilization`: a share of the GPU's total memory, or of the free memory with Unsloth. None
    without vLLM."""
    max_model_len: int
    """Maximum length of prompt plus completion, in tokens."""
    max_num_seqs: int
    """Completions sampled in parallel."""
    sampler: memory.SamplerKind
    sleeps: bool
    """vLLM sleeps during training."""
    parts: dict[str, int]
    """The result of `memory.parts`, in bytes."""
    device: Device

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        return memory.phases(self.parts, sleeps=self.sleeps)

    @property
    def needed(self) -> int:
        """Memory of the phase that needs most, in bytes."""
        return max(self.sampling, self.training)

    @property
    def sampling(self) -> int:
        """Memory during sampling, in bytes."""
        return sum(self.phases["sampling"].values())

    @property
    def training(self) -> int:
        """Memory of the larger of the two training phases (loss and backward), in bytes."""
        return max(sum(phase.values()) for name, phase in self.phases.items() if name != "sampling")

    @property
    def fits(self) -> bool:
        return self.needed <= self.device.usable

    def record(self) -> dict[str, Any]:
        """Return the fields for run.json, with memory in GiB."""
        names = ("micro_batch_size", "gpu_memory_share", "max_model_len", "max_num_seqs", "sampler", "sleeps")
        return {
            "gpu": self.device.name,
            "total_gib": _gib(self.device.total),
            "free_gib": _gib(self.device.free),
            **{name: getattr(self, name) for name in names},
            "planned_gib": {name: _gib(size) for name, size in self.parts.items() if size},
            "planned_phases_gib": {name: _gib(sum(phase.values())) for name, phase in self.phases.items()},
        }


@dataclass(frozen=True)
class Planner:
    """Plans settings for a model on a device, with its training engine and sampler."""

    shape: Shape
    device: Device
    sampler: memory.SamplerKind
    fused: bool = False
    """Whether Unsloth's kernels run the layers."""
    sleeps: bool = True
    """vLLM sleeps during training."""
    world_size: int | None = None
    """Number of training processes; None reads `WORLD_SIZE`."""

    def at(self, config: RunConfig, micro: int, sequences: int) -> Fit:
        """Return the plan for a micro-batch size and a number of parallel completions, even if it does not fit."""
        sampler, completion = self._sampler(config), config.sampling.max_completion_tokens
        step = memory.Step(
            micro_batch_size=micro,
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
            fused=self.fused,
            on_cpu=self.device.on_cpu,
        )
        sizes, longest = memory.parts(self.shape, step), config.model.max_sequence_tokens
        plan = Fit(micro, None, longest, sequences, sampler, self.sleeps, sizes, self.device)
        if sampler not in ("vllm", "shared"):
            return plan
        # Rounded up to a thousandth.
        share = math.ceil(1000 * (_engine_bytes(plan) + sizes["kv_cache"]) / max(_share_base(plan), 1)) / 1000
        return dataclasses.replace(plan, gpu_memory_share=min(1.0, share))

    def candidates(self, config: RunConfig) -> list[Fit]:
        """Return the plans to choose from; the last one needs the least memory.

        Raises:
            UserError: the requested share leaves vLLM no room for one completion.
        """
        most = self._completions(config)
        if self.device.on_cpu:  # samples a whole step in parallel; the micro-batch size does not depend on the memory
            return [self.at(config, batch_shape(config, self.world_size).micro_batch_size, most)]
        if self._has_share(config):
            return [self._with_share(config, micro) for micro in self._sizes(config)]
        parallel = [most >> halvings for halvings in range(most.bit_length())]
        return [self.at(config, micro, sequences) for sequences in parallel for micro in self._sizes(config)]

    def choose(self, config: RunConfig) -> Fit | None:
        """Return the plan with the largest micro-batch and the most parallel completions that fit; None if none fits.

        Args:
            config: the run. `train.micro_batch_size` and `model.gpu_memory_share` are planned if they are None, else
                used as requested. A requested micro-batch that is too large is used if a smaller one would fit.

        Raises:
            UserError: the requested share leaves vLLM no room for one completion.
        """
        candidates = self.candidates(config)
        fitting = [plan for plan in candidates if plan.fits]
        if not fitting and config.train.micro_batch_size is not None and self.fits(config, 1, 1):
            fitting = [plan for plan in candidates if plan.sampling <= plan.device.usable] or candidates[-1:]
        # If vLLM sleeps, both sizes can be at their maximum; otherwise sampling and training share the memory.

        def sizes(plan: Fit) -> tuple[int, int]:
            return plan.micro_batch_size * plan.max_num_seqs, plan.max_num_seqs

        return max(fitting, key=sizes, default=None)

    def least(self, config: RunConfig) -> Fit:
        """Return the candidate that needs the least memory."""
        if self.device.on_cpu:
            return self.candidates(config)[-1]
        micro = self._sizes(config)[-1]
        return self._with_share(config, micro) if self._has_share(config) else self.at(config, micro, 1)

    def fits(self, config: RunConfig, micro: int, sequences: int) -> bool:
        """Return whether a micro-batch fits with this many parallel completions."""
        if self.device.on_cpu or not self._has_share(config):
            return self.at(config, micro, sequences).fits
        try:
            plan = self._with_share(config, micro)
        except UserError:  # the share is too small
            return False
        return plan.fits and plan.max_num_seqs >= sequences

    def accepts(self, config: RunConfig) -> bool:
        """Return whether at least one plan fits."""
        try:
            return self.least(config).fits
        except UserError:  # the share is too small
            return False

    def _sizes(self, config: RunConfig) -> list[int]:
        """Return the micro-batch sizes to choose from, the smallest last."""
        requested = config.train.micro_batch_size
        return micro_batches(config, self.world_size) if requested is None else [requested]

    def _completions(self, config: RunConfig) -> int:
        """Return the completions per step and process."""
        shape = batch_shape(config, self.world_size)
        return shape.accumulation_steps * shape.micro_batch_size

    def _has_share(self, config: RunConfig) -> bool:
        return config.model.gpu_memory_share is not None and self._sampler(config) != "transformers"

    def _with_share(self, config: RunConfig, micro: int) -> Fit:
        """Return the plan with the requested share, which vLLM fills with its KV cache."""
        share = config.model.gpu_memory_share
        assert share is not None
        one = self.at(config, micro, 1)
        sequence, base, engine = one.parts["kv_cache"], _share_base(one), _engine_bytes(one)
        cache = int(share * base) - engine
        if cache < sequence:
            enough = math.ceil(100 * (engine + sequence) / base) / 100
            raise UserError(
                f"--model.gpu-memory-share {share:g} leaves vLLM {max(cache, 0) / GIB:.2f} GiB for its KV cache, and "
                f"one completion needs {sequence / GIB:.2f}; leave the flag out"
                + (f", or pass {enough:g} or more" if enough <= 1 else "")
            )
        sequences = min(self._completions(config), cache // sequence)
        sizes = {**one.parts, "kv_cache": cache}
        return dataclasses.replace(one, gpu_memory_share=share, max_num_seqs=sequences, parts=sizes)

    def _sampler(self, config: RunConfig) -> memory.SamplerKind:
        """Return the sampler; a suggestion may have changed it."""
        is_engine = self.sampler in ("vllm", "shared")
        return "transformers" if is_engine and config.sampling.backend == "transformers" else self.sampler


def _engine_bytes(plan: Fit) -> int:
    """Return vLLM's memory without its KV cache, in bytes."""
    size = sum(plan.parts[name] for name in ("vllm_weights", "vllm_adapter", "vllm_workspace"))
    return size + (plan.parts["weights"] if plan.sampler == "shared" else 0)


def _share_base(plan: Fit) -> int:
    """Return the memory that vLLM's share refers to, in bytes: the free memory for Unsloth, else the GPU's total
    memory.

    Source: unsloth_zoo.vllm_utils.approximate_vllm_memory_usage.
    """
    return plan.device.free - plan.parts["context"] if plan.sampler == "shared" else plan.device.total


def _gib(size: int) -> float:
    return round(size / GIB, 3)
