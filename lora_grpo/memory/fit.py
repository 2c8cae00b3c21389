"""Chooses how a run uses a device's memory: micro-batch size, parallel completions, and vLLM's memory fraction.

The search, in three stages:

1. `Planner._candidates` lists pairs of a micro-batch size and a number of completions that are sampled in parallel.
2. `Planner.memory` computes the memory of each pair, and vLLM's fraction for it (`estimate.memory_by_part`).
3. `Planner.choose` takes the largest pair that fits.

If none fits, `advice.refusal` says which change of settings helps.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import RunConfig, batch_shape, micro_batches, replace
from lora_grpo.memory import estimate
from lora_grpo.memory.batches import CPU_FRACTION, MAX_BATCH_SIZE
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.shape import Shape
from lora_grpo.memory.step import SamplerKind, Step, starts_vllm
from lora_grpo.memory.teacher import TeacherSize

USABLE_FRACTION = 0.9
"""Fraction of the free memory that a plan may use; the rest is a safety margin. An estimate, not measured."""

ROOM = 6 * GIB
"""Usable memory that stays free if memory is used only to save time: for a base in 16 bits, no gradient checkpointing,
or a vLLM engine that does not sleep. The largest known error of a plan is 5.3 GiB: Unsloth with vLLM on an H200
(docs/results-archive.md). There, a step took 7.3 s in 16 bits and 7.8 s in 4 bits, and for so little no run should end
out of memory."""

_MAX_CONTEXT = 1 << 24
"""Upper limit of the search for the longest context, in tokens."""

BUSY_MICRO_BATCH = 16
"""Completions of a micro-batch that keep a GPU busy: 16 of 1,024 tokens; Unsloth's notebooks use 4 to 8. With Unsloth's
gradient checkpointing, it is the largest default, because the inputs of all layers are in pinned host memory: 2.3 GiB
for 16 completions of a 3B model, 9 GiB for 64."""


@dataclass(frozen=True)
class Device:
    """The memory of a GPU in bytes, before this process uses any. Without a GPU, the memory of the machine."""

    name: str
    total: int
    free: int
    on_cpu: bool = False
    host: int | None = None
    """Available memory of the machine that has the GPU. None: not checked."""
    is_unified: bool = False
    """Whether GPU and CPU share one memory, so that nothing gets room by leaving the GPU."""
    is_present: bool = True
    """False for a GPU that a plan assumes, because this machine has none."""

    @property
    def usable(self) -> int:
        """Memory that a plan may use; see USABLE_FRACTION."""
        return int(USABLE_FRACTION * self.free)


@dataclass(frozen=True)
class MemoryEstimate:
    """How a run with certain batch sizes uses the memory of a device."""

    micro_batch_size: int
    max_num_seqs: int
    """Completions sampled in parallel."""
    sampler: SamplerKind
    parts: dict[str, int]
    """The result of `estimate.memory_by_part`, in bytes."""
    device: Device
    host_bytes: int = 0
    """The result of `estimate.host_bytes`."""
    gpu_memory_share: float | None = None
    """vLLM's `gpu_memory_utilization`, a fraction of the GPU's total memory. None without vLLM."""
    min_gpu_memory_share: float = 0.0
    """The smallest `gpu_memory_share` with room for the parallel completions."""
    engine_sleeps: bool = True
    """Whether a vLLM engine gives its memory back while the model is trained. True without an engine."""

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """The parts that exist in each phase of a step, in bytes."""
        return estimate.phases(self.parts, engine_sleeps=self.engine_sleeps)

    @property
    def sampling(self) -> int:
        """Memory during sampling, in bytes."""
        return sum(self.phases["sampling"].values())

    @property
    def training(self) -> int:
        """Memory of the largest phase of training, in bytes."""
        return max(sum(parts.values()) for name, parts in self.phases.items() if name != "sampling")

    @property
    def needed(self) -> int:
        """Memory of the phase with the highest demand, in bytes."""
        return max(self.sampling, self.training)

    @property
    def taken(self) -> int:
        """What the run takes of the device in bytes: with one memory for GPU and CPU, also what leaves the GPU."""
        return self.needed + self.host_bytes if self.device.is_unified else self.needed

    @property
    def sampling_fits(self) -> bool:
        share = 1.0 if self.gpu_memory_share is None else self.gpu_memory_share
        return self.sampling <= self.device.usable and self.min_gpu_memory_share <= share

    @property
    def host_available(self) -> int | None:
        """Host memory for what leaves the GPU, in bytes. None: not checked."""
        if self.device.is_unified:
            return max(0, self.device.usable - self.needed)
        return self.device.host

    @property
    def host_fits(self) -> bool:
        return self.host_available is None or self.host_bytes <= self.host_available

    @property
    def fits(self) -> bool:
        return self.sampling_fits and self.training <= self.device.usable and self.host_fits

    def leaves(self, room: int) -> bool:
        """Return whether the run fits and leaves so many of the usable bytes free."""
        return self.fits and self.taken + room <= self.device.usable

    def record(self) -> dict[str, Any]:
        """Return the fields for run.json, with memory in GiB."""
        return {
            "micro_batch_size": self.micro_batch_size,
            "max_num_seqs": self.max_num_seqs,
            "sampler": self.sampler,
            "gpu_memory_share": self.gpu_memory_share,
            "engine_sleeps": self.engine_sleeps,
            "gpu": self.device.name,
            "is_unified": self.device.is_unified,
            "total_gib": _gib(self.device.total),
            "free_gib": _gib(self.device.free),
            "planned_gib": {name: _gib(size) for name, size in self.parts.items() if size},
            "planned_host_gib": _gib(self.host_bytes),
            "planned_phases_gib": {name: _gib(sum(phase.values())) for name, phase in self.phases.items()},
        }


@dataclass(frozen=True)
class _BatchSizes:
    """A candidate of the search."""

    micro_batch_size: int
    sequences: int
    """Completions sampled in parallel."""


@dataclass(frozen=True)
class Planner:
    """Plans settings for a model on a device, with its training engine and sampler."""

    shape: Shape
    device: Device
    sampler: SamplerKind
    unsloth_kernels: bool = False
    """Whether Unsloth's kernels run the layers."""
    packs: bool = False
    """Whether the training engine can read each prompt once for its group."""
    teacher: TeacherSize | None = None
    """The teacher of the run; None without one."""
    row_lengths: RowLengths | None = None
    """The lengths of the run's rows; None: every row has the maximum length."""

    def choose(self, config: RunConfig) -> MemoryEstimate | None:
        """Return the memory with the largest micro-batch and the most parallel completions that fit; None if none fits.

        A requested micro-batch is the only one to choose from. If it does not fit, but a smaller one would, it is
        returned all the same: the user decides, and gets a warning (`Plan.too_large`).
        """
        estimates = self._estimates(config)
        usable = [candidate for candidate in estimates if candidate.fits]

        is_requested = config.train.micro_batch_size is not None
        if not usable and is_requested and self.memory(config, 1, 1).fits:
            # Training does not fit with the request, whatever is sampled in parallel, so only sampling counts.
            usable = [candidate for candidate in estimates if candidate.sampling_fits]
            if not usable:
                usable = [estimates[-1]]  # the fewest parallel completions
        return self._all_at_once(config, _largest(usable))

    def choose_with_room(self, config: RunConfig) -> MemoryEstimate | None:
        """Return the memory of the fastest batch sizes that leave ROOM; None if those of `smallest_fast` do not."""
        least = self.smallest_fast(config)
        usable = []
        for candidate in self._estimates(config):
            is_fast = candidate.max_num_seqs == least.max_num_seqs
            is_fast = is_fast and candidate.micro_batch_size >= least.micro_batch_size
            if is_fast and candidate.leaves(ROOM):
                usable.append(candidate)
        return self._all_at_once(config, _largest(usable))

    def smallest_fast(self, config: RunConfig) -> MemoryEstimate:
        """Return the memory with a micro-batch that keeps a GPU busy, and all completions of the step in parallel."""
        candidates = self._candidates(config)
        sequences = candidates[0].sequences
        sizes = [sizes.micro_batch_size for sizes in candidates if sizes.sequences == sequences]  # largest first
        busy_sizes = [size for size in sizes if size <= BUSY_MICRO_BATCH]
        micro_batch_size = busy_sizes[0] if busy_sizes else sizes[-1]
        return self.memory(config, micro_batch_size, sequences)

    def _all_at_once(self, config: RunConfig, chosen: MemoryEstimate | None) -> MemoryEstimate | None:
        """Return the memory with an engine that does not sleep if training fits beside it with room, else `chosen`."""
        if not chosen or config.sampling.engine_sleep is not None or not starts_vllm(chosen.sampler):
            return chosen
        awake_config = replace(config, {"sampling": {"engine_sleep": False}})
        awake = self.memory(awake_config, chosen.micro_batch_size, chosen.max_num_seqs)
        return awake if awake.leaves(ROOM) else chosen

    def smallest(self, config: RunConfig) -> MemoryEstimate:
        """Return the memory with the batch sizes that need the least."""
        sizes = self._candidates(config)[-1]
        return self.memory(config, sizes.micro_batch_size, sizes.sequences)

    def longest_context(self, config: RunConfig) -> int:
        """Return the most tokens of prompt plus completion that fit, with a micro-batch of one and one completion.

        Returns:
            0 if not even a prompt of one token fits.
        """
        completion = config.sampling.max_completion_tokens
        planner = dataclasses.replace(self, row_lengths=None)

        def is_too_long(tokens: int) -> bool:
            with_context = replace(config, {"model": {"max_sequence_tokens": tokens}})
            return not planner.memory(with_context, 1, 1).fits

        # Memory grows with the context, so the first length that does not fit can be found by bisection. The shortest
        # has a prompt of one token.
        lengths = range(completion + 1, _MAX_CONTEXT)
        num_fitting = bisect.bisect_left(lengths, True, key=is_too_long)
        if num_fitting == 0:
            return 0
        return lengths[num_fitting - 1]

    def memory(self, config: RunConfig, micro_batch_size: int, sequences: int) -> MemoryEstimate:
        """Return the memory with a micro-batch size and a number of parallel completions, even if it does not fit."""
        step = Step(
            config=config,
            micro_batch_size=micro_batch_size,
            sequences=sequences,
            sampler=self._sampler(config),
            unsloth_kernels=self.unsloth_kernels,
            on_cpu=self.device.on_cpu,
            packed=self._can_pack(config),
            free=self.device.free,
            teacher=self._teacher(config),
            row_lengths=self.row_lengths,
        )
        parts = estimate.memory_by_part(self.shape, step)
        host_bytes = estimate.host_bytes(self.shape, step, parts)
        share = None
        min_share = 0.0

        if step.uses_vllm:
            # vLLM's fraction covers its weights, its workspace and the KV cache of the parallel completions.
            without_cache = parts["vllm_weights"] + parts["vllm_adapter"] + parts["vllm_workspace"]
            if step.sampler == "shared":
                without_cache += parts["weights"]  # Unsloth's vLLM loads the weights that are trained
            needed_fraction = (without_cache + parts["kv_cache"]) / self.device.total
            min_share = _round_up_to_thousandth(needed_fraction)
            share = config.model.gpu_memory_share
            if share is None:
                share = min(1.0, min_share)
            else:
                # vLLM fills the memory that it was given with the KV cache.
                given_to_cache = int(share * self.device.total) - without_cache
                parts["kv_cache"] = max(parts["kv_cache"], given_to_cache)

        return MemoryEstimate(
            micro_batch_size=micro_batch_size,
            max_num_seqs=sequences,
            sampler=step.sampler,
            parts=parts,
            device=self.device,
            host_bytes=host_bytes,
            gpu_memory_share=share,
            min_gpu_memory_share=min_share,
            engine_sleeps=step.engine_sleeps,
        )

    def _estimates(self, config: RunConfig) -> list[MemoryEstimate]:
        """Return the memory with all batch sizes to choose from, the smallest last."""
        estimates = []
        for sizes in self._candidates(config):
            estimates.append(self.memory(config, sizes.micro_batch_size, sizes.sequences))
        return estimates

    def _candidates(self, config: RunConfig) -> list[_BatchSizes]:
        """Return the batch sizes to choose from, the smallest last."""
        batch = batch_shape(config)
        completions = batch.parallel_samples
        if self.device.on_cpu:
            # A whole step is sampled in parallel, and so are validation and evaluation. The micro-batch size does not
            # depend on the memory.
            sequences = max(completions, config.monitor.rows)
            if self.sampler != "server":
                sequences = max(sequences, self._evaluated_in_parallel(config))
            return [_BatchSizes(batch.micro_batch_size, sequences)]

        sizes = micro_batches(config)  # largest first
        if config.train.micro_batch_size is not None:
            sizes = [config.train.micro_batch_size]
        elif self.unsloth_kernels and config.train.gradient_checkpointing:
            sizes = [size for size in sizes if size <= BUSY_MICRO_BATCH]

        # All completions of the step in parallel, half of them, and so on, each with every micro-batch size.
        candidates = []
        sequences = completions
        while sequences:
            candidates += [_BatchSizes(size, sequences) for size in sizes]
            sequences //= 2
        return candidates

    def _evaluated_in_parallel(self, config: RunConfig) -> int:
        """Return how many completions an evaluation samples in parallel on a CPU; see `max_batch_size`."""
        parts = self.memory(config, 1, 1).parts
        bytes_per_completion = parts["kv_cache"] + parts["token_selection"]
        fitting = int(CPU_FRACTION * self.device.total / bytes_per_completion)
        power_of_two = 1 << max(0, fitting.bit_length() - 1)
        rows = config.data.eval_limit or MAX_BATCH_SIZE
        return min(power_of_two, MAX_BATCH_SIZE, rows * max(1, config.eval.num_samples))

    def _sampler(self, config: RunConfig) -> SamplerKind:
        """Return the sampler to plan for: the planner's, unless the configuration selects the transformers backend.

        The configuration may be a suggestion of `advice`, which tries another backend than the run's.
        """
        if self.sampler == "merged":  # the transformers backend on a CPU
            return "merged"
        return "transformers" if config.sampling.backend == "transformers" else self.sampler

    def _teacher(self, config: RunConfig) -> TeacherSize | None:
        """Return the teacher to plan for, with the bits of the configuration, which may be a suggestion of `advice`."""
        if self.teacher is None or self.teacher.own_bits is None:
            return self.teacher
        return dataclasses.replace(self.teacher, own_bits=config.teacher.bits)

    def _can_pack(self, config: RunConfig) -> bool:
        """Return whether each prompt is read once for its group: needs plain attention that reaches all tokens."""
        is_within_window = self.shape.window is None or config.model.max_sequence_tokens <= self.shape.window
        has_plain_attention = not any(layer.delta or layer.capped for layer in self.shape.kinds)
        return self.packs and config.method == "grpo" and is_within_window and has_plain_attention


def _largest(estimates: Sequence[MemoryEstimate]) -> MemoryEstimate | None:
    """Return the memory with the largest micro-batch and, of these, the most parallel completions."""
    return max(estimates, key=lambda estimate: (estimate.micro_batch_size, estimate.max_num_seqs), default=None)


def _round_up_to_thousandth(fraction: float) -> float:
    return math.ceil(1000 * fraction) / 1000


def _gib(size: int) -> float:
    return round(size / GIB, 3)
