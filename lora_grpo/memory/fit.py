"""Plans how a run uses a device's memory: micro-batch size, parallel completions, and vLLM's memory fraction.

If a run does not fit, `refusal` names the cheapest change of settings that makes it fit.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import RunConfig, batch_shape, micro_batches, replace
from lora_grpo.flags import flag
from lora_grpo.memory import estimate
from lora_grpo.memory.batches import CPU_FRACTION, MAX_BATCH_SIZE
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.shape import Shape

USABLE_FRACTION = 0.9
"""Fraction of the free memory that a plan may use; the rest is a safety margin. An estimate, not measured."""

_MAX_CONTEXT = 1 << 24
"""Upper limit of the search for the longest context, in tokens."""

_UNSLOTH_MICRO_BATCH = 16
"""Largest default micro-batch size with Unsloth, in completions. Its gradient checkpointing holds the inputs of all
layers in pinned host memory: 2.3 GiB for 16 completions of a 3B model, 9 GiB for 64. 16 completions of 1,024 tokens
keep a GPU busy, and Unsloth's notebooks use 4 to 8."""

Suggestion = Mapping[str, Any]
"""Settings by dotted name: `{"model.bits": 4}`."""

_MIN_TOKENS, _MIN_RANK, _MIN_ROWS = 32, 4, 16
"""Lowest suggested values. Below them a run learns very little, and a smaller model is a better choice."""


@dataclass(frozen=True)
class Device:
    """The memory of a GPU in bytes, before this process uses any. Without a GPU, the memory of the machine."""

    name: str
    total: int
    free: int
    on_cpu: bool = False
    host: int | None = None
    """Available memory of the machine that has the GPU. None: not checked."""

    @property
    def usable(self) -> int:
        """Memory that a plan may use; see USABLE_FRACTION."""
        return int(USABLE_FRACTION * self.free)


@dataclass(frozen=True)
class MemoryEstimate:
    """How a run uses the memory of a device."""

    micro_batch_size: int
    max_num_seqs: int
    """Completions sampled in parallel."""
    sampler: estimate.SamplerKind
    parts: dict[str, int]
    """The result of `estimate.memory_by_part`, in bytes."""
    device: Device
    host_bytes: int = 0
    """The result of `estimate.host_bytes`."""
    gpu_memory_share: float | None = None
    """vLLM's `gpu_memory_utilization`, a fraction of the GPU's total memory. None without vLLM."""
    least_share: float = 0.0
    """The smallest fraction with room for the parallel completions."""

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        return estimate.phases(self.parts)

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
    def sampling_fits(self) -> bool:
        return self.sampling <= self.device.usable and self.least_share <= (self.gpu_memory_share or 1.0)

    @property
    def host_fits(self) -> bool:
        return self.device.host is None or self.host_bytes <= self.device.host

    @property
    def fits(self) -> bool:
        return self.sampling_fits and self.training <= self.device.usable and self.host_fits

    def record(self) -> dict[str, Any]:
        """Return the fields for run.json, with memory in GiB."""
        return {
            "micro_batch_size": self.micro_batch_size,
            "max_num_seqs": self.max_num_seqs,
            "sampler": self.sampler,
            "gpu_memory_share": self.gpu_memory_share,
            "gpu": self.device.name,
            "total_gib": _gib(self.device.total),
            "free_gib": _gib(self.device.free),
            "planned_gib": {name: _gib(size) for name, size in self.parts.items() if size},
            "planned_host_gib": _gib(self.host_bytes),
            "planned_phases_gib": {name: _gib(sum(phase.values())) for name, phase in self.phases.items()},
        }


@dataclass(frozen=True)
class Planner:
    """Plans settings for a model on a device, with its training engine and sampler."""

    shape: Shape
    device: Device
    sampler: estimate.SamplerKind
    fused: bool = False
    """Whether Unsloth's kernels run the layers."""
    packs: bool = False
    """Whether the training engine can read each prompt once for its group."""
    row_lengths: RowLengths | None = None
    """The longest of the run's rows; None: every row has the maximum length."""

    def estimate(self, config: RunConfig, micro: int, sequences: int) -> MemoryEstimate:
        """Return the plan for a micro-batch size and a number of parallel completions, even if it does not fit."""
        # The backend may be a suggestion, which differs from the run's.
        replaced = config.sampling.backend == "transformers" and self.sampler != "merged"
        sampler = "transformers" if replaced else self.sampler
        reached = self.shape.window is None or config.model.max_sequence_tokens <= self.shape.window
        attends = not any(layer.delta or layer.capped for layer in self.shape.kinds)
        packed = self.packs and config.method == "grpo" and reached and attends
        on_cpu, free = self.device.on_cpu, self.device.free
        step = estimate.Step(config, micro, sequences, sampler, self.fused, on_cpu, packed, free, self.row_lengths)
        sizes = estimate.memory_by_part(self.shape, step)
        fit = MemoryEstimate(
            micro, sequences, sampler, sizes, self.device, estimate.host_bytes(self.shape, step, sizes)
        )
        if sampler not in ("vllm", "shared"):
            return fit
        engine = sum(sizes[name] for name in ("vllm_weights", "vllm_adapter", "vllm_workspace"))
        if sampler == "shared":
            engine += sizes["weights"]  # Unsloth's vLLM loads the weights that are trained
        total = self.device.total
        least = math.ceil(1000 * (engine + sizes["kv_cache"]) / total) / 1000  # rounded up to a thousandth
        share = config.model.gpu_memory_share
        if share is None:
            return dataclasses.replace(fit, gpu_memory_share=min(1.0, least), least_share=least)
        # vLLM fills its memory with the KV cache.
        sizes["kv_cache"] = max(sizes["kv_cache"], int(share * total) - engine)
        return dataclasses.replace(fit, gpu_memory_share=share, least_share=least)

    def choose(self, config: RunConfig) -> MemoryEstimate | None:
        """Return the plan with the largest micro-batch and the most parallel completions that fit; None if none fits.

        A requested micro-batch that is too large is used if a smaller one would fit.
        """
        candidates = [self.estimate(config, micro, sequences) for micro, sequences in self._choices(config)]
        fitting = [plan for plan in candidates if plan.fits]
        if not fitting and config.train.micro_batch_size is not None and self.estimate(config, 1, 1).fits:
            fitting = [plan for plan in candidates if plan.sampling_fits] or candidates[-1:]
        return max(fitting, key=lambda plan: (plan.micro_batch_size, plan.max_num_seqs), default=None)

    def least(self, config: RunConfig) -> MemoryEstimate:
        """Return the plan that needs the least memory."""
        return self.estimate(config, *self._choices(config)[-1])

    def longest_context(self, config: RunConfig) -> int:
        """Return the most tokens of prompt plus completion that fit, with a micro-batch of one and one completion."""
        completion, limit = config.sampling.max_completion_tokens, dataclasses.replace(self, row_lengths=None)

        def too_long(tokens: int) -> bool:
            return not limit.estimate(replace(config, {"model": {"max_sequence_tokens": tokens}}), 1, 1).fits

        # Memory grows with the context, so the first that is too long can be found by bisection.
        fitting = bisect.bisect_left(range(completion + 1, _MAX_CONTEXT), True, key=too_long)
        return completion + fitting if fitting else 0

    def _choices(self, config: RunConfig) -> list[tuple[int, int]]:
        """Return the micro-batch sizes and numbers of parallel completions to choose from, the smallest last."""
        sizes, batch = micro_batches(config), batch_shape(config)
        completions = batch.parallel_samples
        if self.device.on_cpu:  # samples a whole step in parallel; the micro-batch size does not depend on the memory
            return [(batch.micro_batch_size, max(completions, config.monitor.rows, self._evaluated(config)))]
        if config.train.micro_batch_size is not None:
            sizes = [config.train.micro_batch_size]
        elif self.fused:
            sizes = [size for size in sizes if size <= _UNSLOTH_MICRO_BATCH]
        parallel = [completions >> halvings for halvings in range(completions.bit_length())]
        return [(micro, sequences) for sequences in parallel for micro in sizes]

    def _evaluated(self, config: RunConfig) -> int:
        """Return how many completions an evaluation samples in parallel on a CPU; see `max_batch_size`."""
        one = self.estimate(config, 1, 1).parts
        fit = int(CPU_FRACTION * self.device.total / (one["kv_cache"] + one["token_selection"]))
        rows = config.data.eval_limit or MAX_BATCH_SIZE
        return min(1 << max(0, fit.bit_length() - 1), MAX_BATCH_SIZE, rows * max(1, config.eval.num_samples))


def _gib(size: int) -> float:
    return round(size / GIB, 3)


def refusal(planner: Planner, config: RunConfig) -> str:
    """Return the error message for a run that does not fit: the memory of the smallest plan, and the flags to pass."""
    least, device = planner.least(config), planner.device
    share = config.model.gpu_memory_share
    if share is not None and least.least_share > share:
        return (
            f"--model.gpu-memory-share {share:g} is too small: vLLM's weights and one completion need "
            f"{least.least_share:g}; leave the flag out"
        )
    advice = f"pass {_advice(planner, config)}"
    if not least.host_fits:
        return (
            f"{config.model.name} needs {least.host_bytes / GIB:.2f} GiB of host memory for what leaves the GPU, "
            f"{(device.host or 0) / GIB:.2f} are available; close other programs, on WSL2 raise memory= in .wslconfig, "
            f"or {advice}"
        )
    if dataclasses.replace(planner, device=dataclasses.replace(device, free=device.total)).least(config).fits:
        advice = f"close other programs that use the {'memory' if device.on_cpu else 'GPU'}, or {advice}"
    phase, sizes = max(least.phases.items(), key=lambda item: sum(item[1].values()))
    by_part = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in sizes.items() if size)
    return (
        f"{config.model.name} does not fit on {device.name}: {phase} with a micro-batch of {least.micro_batch_size} "
        f"and {least.max_num_seqs} completions in parallel needs {sum(sizes.values()) / GIB:.2f} GiB ({by_part}), "
        f"{device.usable / GIB:.2f} are usable ({device.free / GIB:.2f} of {device.total / GIB:.2f} are free); {advice}"
    )


def _advice(planner: Planner, config: RunConfig) -> str:
    """Return the flags of the cheapest change with which the run fits, and the memory that it then needs."""
    enough = _cheapest(planner, config)
    if not enough:
        return "a smaller --model.name"
    changes = [(flag(name), value) for suggestion in enough for name, value in suggestion.items()]
    flags = [f"no {name}" if value is None else name if value is True else f"{name} {value}" for name, value in changes]
    return f"{' '.join(flags)} (needs {planner.least(_changed(config, *enough)).needed / GIB:.2f} GiB)"


def memory_saving_options(planner: Planner, config: RunConfig) -> Iterator[list[Suggestion]]:
    """Yield settings that need less memory, each with decreasing values.

    Settings that only cost time come first, then those that hardly change the result, then those that limit learning.
    """
    micro, completion = config.train.micro_batch_size, config.sampling.max_completion_tokens
    prompt, with_engine = config.model.max_sequence_tokens - completion, planner.sampler in ("vllm", "shared")
    if planner.device.on_cpu:  # an evaluation samples more completions at once than a step
        yield [{"data.eval_limit": rows} for rows in _halves(config.data.eval_limit or MAX_BATCH_SIZE, _MIN_ROWS)]
    if with_engine and config.model.gpu_memory_share is not None:
        yield [{"model.gpu_memory_share": None}]
    yield [{"train.micro_batch_size": size} for size in micro_batches(config) if size < (micro or 0)]
    if not config.train.gradient_checkpointing:
        yield [{"train.gradient_checkpointing": True}]
    if with_engine:
        yield [{"sampling.backend": "transformers"}]
    if "8bit" not in config.train.optimizer and config.train.optimizer != "sgd":
        yield [{"train.optimizer": "adamw_8bit"}]
    if config.model.bits == 16:
        yield [{"model.bits": 4}]
    yield [{"lora.rank": rank} for rank in _halves(config.lora.rank, _MIN_RANK)]
    # Shorter prompts, shorter completions, then both.
    prompts, completions = _halves(prompt, _MIN_TOKENS), _halves(completion, _MIN_TOKENS)
    lengths = [(prompt, each) for each in completions] + [*zip(prompts, completions, strict=False)]
    shorter = [{"sampling.max_completion_tokens": each, "model.max_sequence_tokens": p + each} for p, each in lengths]
    yield [*({"model.max_sequence_tokens": each + completion} for each in prompts), *shorter]


def _cheapest(planner: Planner, config: RunConfig) -> Sequence[Suggestion]:
    """Return the cheapest change with which the run fits: one setting if one is enough; none if nothing is."""
    if planner.device.on_cpu:  # the default micro-batch size on a CPU does not depend on the memory
        config = _changed(config, {"train.micro_batch_size": planner.least(config).micro_batch_size})
    ladders = [ladder for ladder in memory_saving_options(planner, config) if ladder]

    def fits(*suggestions: Suggestion) -> bool:
        return planner.least(_changed(config, *suggestions)).fits

    for suggestion in (each for ladder in ladders for each in ladder):
        if fits(suggestion):
            return [suggestion]
    # Lower all settings as far as possible, then raise each as far as the run still fits, the most expensive first.
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
