"""Plans a run from the model's config.json, before any weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import (
    Invocation,
    RunConfig,
    choose_engine,
    flag,
    hardware,
    local_sampler,
    replace,
    uses_vllm,
    with_gpu_defaults,
)
from lora_grpo.errors import UserError
from lora_grpo.models import GIB, Shape, UnknownFamily, base_model, memory, positive_int
from lora_grpo.planning.duration import SAMPLING_SHARES, TRAINING_SHARE, Duration, Work, estimate
from lora_grpo.planning.fit import USABLE_SHARE, Device, Fit, Planner
from lora_grpo.planning.suggestions import advice, choose_fit, refusal
from lora_grpo.runs import newest_step

_MOST = 1 << 24
"""Upper limit of the search for the largest micro-batch and context."""


@dataclass(frozen=True)
class Largest:
    """The largest values that still fit, with all other settings unchanged."""

    micro_batch_size: int
    """With the planned number of parallel completions. It may not divide a step."""
    context: int
    """Prompt plus completion in tokens, with the planned micro-batch and parallel completions; 0 if none fits."""
    smallest_batch_context: int
    """The same with a micro-batch of one and one completion at a time; longer contexts are rejected."""
    declared: int | None
    """The model's `max_position_embeddings`."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    model: str
    engine: str
    processes: int
    work: Work
    duration: Duration
    not_planned: str | None
    """Why the memory is not planned; None if it is."""
    shape: Shape | None
    fit: Fit | None
    largest: Largest | None
    too_large: str | None
    """The error message for requested settings that do not fit, with suggestions; None if they fit."""
    instead: str | None
    """The suggestions alone; None if the settings fit."""
    derived: tuple[str, ...]
    """Names of the settings that the plan resolved."""
    assumptions: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return the fields for run.json: `memory` (GPU only) and `plan`, with memory in GiB."""
        memory = self.fit.record() if self.fit else None
        on_gpu = self.fit is not None and not self.fit.device.on_cpu
        plan = {
            "memory": memory or {"not_planned": self.not_planned},
            "largest": dataclasses.asdict(self.largest) if self.largest else None,
            "work": {**dataclasses.asdict(self.work), "completions": self.work.completions, "tokens": self.work.tokens},
            "time": self.duration.record(),
            "assumptions": list(self.assumptions),
        }
        return {"memory": {"derived": list(self.derived), **memory} if memory and on_gpu else None, "plan": plan}

    def lines(self) -> list[str]:
        """Return the short form of the plan that a run prints at the start."""
        lines = [f"memory: not planned: {self.not_planned}"] if self.not_planned else []
        if self.fit and self.largest:
            fit, device = self.fit, self.fit.device
            share = f", vLLM's share {fit.gpu_memory_share:g}" if fit.gpu_memory_share else ""
            text = (
                f"memory: micro-batch {fit.micro_batch_size} (at most {self.largest.micro_batch_size} would fit), "
                f"{fit.max_num_seqs} parallel completions{share}; planned {fit.training / GIB:.1f} GiB for training, "
                f"{fit.sampling / GIB:.1f} GiB for sampling, of {device.free / GIB:.1f} free"
            )
            lines.append(text if fit.fits else f"{text}: not enough for your settings; {self.instead}")
        work = self.work
        tokens = count(work.tokens)
        lines.append(f"work: {work.steps} steps of {work.completions_per_step} completions, at most {tokens} tokens")
        return [*lines, f"time: {self.duration.text()}"]


def make_plan(config: RunConfig, invocation: Invocation) -> tuple[RunConfig, Plan]:
    """Plan a run, and resolve the settings that depend on the GPU's memory.

    Args:
        config: the checked configuration.
        invocation: with `plan`, the GPU need not be present; with `resume`, finished steps are subtracted.

    Returns:
        The resolved configuration, and the plan.

    Raises:
        UserError: the run does not fit, or the model's configuration cannot be read.
    """
    device, is_present = _find_device(config, planning=invocation.plan)
    if not is_present:
        config = with_gpu_defaults(config)
    engine = choose_engine(config)
    derived = [] if device.on_cpu or config.train.micro_batch_size is not None else ["train.micro_batch_size"]
    if not device.on_cpu and config.model.gpu_memory_share is None and local_sampler(config) != "transformers":
        derived.append("model.gpu_memory_share")
    work = Work.of(config, newest_step(config.folder / "checkpoints") if invocation.resume else 0)
    fit = largest = too_large = instead = None
    shape, model, not_planned = _read_shape(config, device, derived)
    if shape is not None:
        planner = Planner(shape, device, _sampler(config, device), fused=engine == "unsloth" and not device.on_cpu)
        fit = choose_fit(planner, config)
        declared = (
            None if model.get("max_position_embeddings") is None else positive_int(model, "max_position_embeddings")
        )
        largest = _find_largest(planner, config, fit, declared)
        if not fit.fits:
            too_large, instead = refusal(planner, config), advice(planner, config)
        if not device.on_cpu:
            resolved = {"train": {"micro_batch_size": fit.micro_batch_size}}
            config = replace(config, {**resolved, "model": {"gpu_memory_share": fit.gpu_memory_share}})
    plan = Plan(
        model=config.model.name,
        engine=engine,
        processes=distributed.world_size(),
        work=work,
        duration=estimate(config, work, shape, fit, derived),
        not_planned=not_planned,
        shape=shape,
        fit=fit,
        largest=largest,
        too_large=too_large,
        instead=instead,
        derived=tuple(derived),
        assumptions=tuple(_assumptions(config, device, fit, is_present=is_present)),
    )
    return config, plan


def _read_shape(
    config: RunConfig, device: Device, derived: Sequence[str]
) -> tuple[Shape | None, dict[str, Any], str | None]:
    """Return the model's shape, its config.json, and the reason if the memory cannot be planned.

    Raises:
        UserError: the memory cannot be planned, but the derived settings require it.
    """
    if device.on_cpu and uses_vllm(config) and not config.sampling.server_url:
        return None, {}, "vLLM's memory on a CPU is unknown"
    try:
        model = base_model.read_config(config.model)
    except UserError as error:
        if derived:
            raise
        return None, {}, str(error)
    try:
        return Shape.of(model), model, None
    except UnknownFamily as error:
        if derived:
            raise UserError(f"{error}; pass {' and '.join(map(flag, derived))}") from None
        return None, model, str(error)


def _find_device(config: RunConfig, *, planning: bool) -> tuple[Device, bool]:
    """Return the device to plan for, and whether it is present."""
    gpus, _ = hardware.nvidia_gpus()
    if gpus:
        device = Device.of(gpus[0])
        # Processes that start at different times see different free memory but must compute the same plan.
        return (dataclasses.replace(device, free=device.total) if distributed.world_size() > 1 else device), True
    if planning and (gigabytes := hardware.preset_gigabytes(config.preset)):
        return Device(f"a GPU with {gigabytes} GB", gigabytes * GIB, gigabytes * GIB), False
    return Device("this machine", *hardware.machine_memory(), on_cpu=True), True


def _sampler(config: RunConfig, device: Device) -> memory.SamplerKind:
    """Return the sampler. On a CPU, the kit's own sampler uses a dequantized copy of the model, except with DoRA."""
    return "merged" if device.on_cpu and not config.lora.dora else local_sampler(config)


def _find_largest(planner: Planner, config: RunConfig, fit: Fit, declared: int | None) -> Largest:
    """Search for the largest micro-batch and context that fit."""

    def context_fits(longest: int, micro: int, sequences: int) -> bool:
        return planner.fits(replace(config, {"model": {"max_sequence_tokens": longest}}), micro, sequences)

    completion, micro, sequences = config.sampling.max_completion_tokens, fit.micro_batch_size, fit.max_num_seqs
    return Largest(
        micro_batch_size=_highest(lambda size: planner.fits(config, size, sequences)),
        context=_highest(lambda longest: context_fits(longest, micro, sequences), above=completion),
        smallest_batch_context=_highest(lambda longest: context_fits(longest, 1, 1), above=completion),
        declared=declared,
    )


def _highest(holds: Callable[[int], bool], above: int = 0) -> int:
    """Return the largest number above `above` for which a monotonic condition holds, or 0 if there is none."""
    low, high = above, above + 1
    while high < _MOST and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low > above else 0


def _assumptions(config: RunConfig, device: Device, fit: Fit | None, *, is_present: bool) -> Iterator[str]:
    """Yield the assumptions of the plan."""
    if not is_present:
        yield f"the GPU has {device.total / GIB:g} GiB, all of it free; no GPU was found on this machine"
        yield "engine and sampling backend are those of the `gpu` extra, unless the settings name them"
    yield "every prompt and every completion has its maximum length"
    if config.data.filter_by_difficulty:
        yield "the samples for --data.filter-by-difficulty are not included"
    if config.monitor.rows:
        yield f"validation on at most {config.monitor.rows} rows is not included"
    if fit is None:
        return
    if device.on_cpu:
        yield f"{memory.LIBRARIES / GIB:g} GiB for Python and the libraries, measured on one machine"
        yield f"{USABLE_SHARE:g} of the available memory is usable (a guess); a container's own limit is not read"
    else:
        yield f"{USABLE_SHARE:g} of the free memory is usable (a guess)"
        context, workspace = memory.CONTEXT / GIB, memory.WORKSPACE / GIB
        yield f"{context:.1f} GiB for the CUDA context and {workspace:.1f} GiB of workspace (guesses)"
        yield "16-bit activations, and an attention kernel that does not store the score matrix"
    if fit.sampler in ("vllm", "shared"):
        graphs = memory.VLLM_WORKSPACE / GIB
        yield f"{graphs:.1f} GiB for vLLM's graphs and activations (a guess); it sleeps during training"
    if config.sampling.server_url:
        yield "the vLLM server's own memory is not included"
    if not device.on_cpu:
        low, high = SAMPLING_SHARES[fit.sampler]
        yield (
            f"time: sampling reaches {low:g} to {high:g} and training {TRAINING_SHARE[0]:g} to {TRAINING_SHARE[1]:g} "
            "of the published rates (guesses: no GPU was measured); loading and rewards are not included"
        )


def count(number: float) -> str:
    """Format a count with three significant digits: 16.4 million."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return f"{number:,.0f}"
