"""Plans a run from the model's config.json, before any weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
from lora_grpo.models import GIB, KNOWN_MODELS, Shape, UnknownFamily, check_architecture, memory, model_files
from lora_grpo.planning.disk_space import DiskSpace
from lora_grpo.planning.fit import USABLE_SHARE, Device, Fit, Planner
from lora_grpo.planning.suggestions import refusal
from lora_grpo.planning.work import Work


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    model: str
    engine: str
    work: Work
    derived: tuple[str, ...]
    """Names of the settings that the plan resolved."""
    assumptions: tuple[str, ...]
    not_planned: str | None = None
    """Why the memory is not planned; None if it is."""
    shape: Shape | None = None
    fit: Fit | None = None
    longest_context: int = 0
    disk: DiskSpace | None = None
    """What the run writes; None if the memory is not planned, because the size of the adapter is then unknown."""
    too_large: str | None = None
    """The error message for requested settings that do not fit, with a suggestion; None if they fit."""
    resumed: bool = False

    def check_disk(self) -> None:
        """Raise a UserError if the disk is too small."""
        if self.disk:
            self.disk.check("" if self.resumed else ", or pass an --output-dir on another disk")

    def record(self) -> dict[str, Any]:
        """Return the entries `memory` and `plan` of run.json, with memory in GiB."""
        memory = self.fit.record() if self.fit else {"not_planned": self.not_planned}
        plan = {
            "longest_context": self.longest_context,
            "work": dataclasses.asdict(self.work),
            "assumptions": list(self.assumptions),
            "disk_bytes": self.disk.num_bytes if self.disk and self.work.steps is not None else None,
        }
        return {"memory": {"derived": list(self.derived), **memory}, "plan": plan}


def make_plan(config: RunConfig, invocation: Invocation) -> tuple[RunConfig, Plan]:
    """Plan a run, and return its configuration with the settings resolved that depend on the GPU's memory.

    With `invocation.plan` or `invocation.dry_run`, the GPU need not be present. With `invocation.resume`, finished
    steps are subtracted.

    Raises:
        UserError: the model cannot be trained, the run does not fit, or the model's configuration cannot be read.
    """
    planning = invocation.plan or invocation.dry_run
    device, is_present = _find_device(config, planning=planning)
    if not is_present:
        config = with_gpu_defaults(config)
    engine = choose_engine(config)
    derived = [] if device.on_cpu or config.train.micro_batch_size is not None else ["train.micro_batch_size"]
    if not device.on_cpu and config.model.gpu_memory_share is None and local_sampler(config) != "transformers":
        derived.append("model.gpu_memory_share")
    model, source = _read_model(config, planning=planning)
    shape, not_planned = _read_shape(model, config, device, derived)
    work = Work.of(config, resumed=invocation.resume)
    fit = disk = too_large = None
    longest_context = 0
    if shape is not None:
        shape.check_targets(config.lora.targets)
        fused, packs = engine == "unsloth" and not device.on_cpu, engine == "peft"
        planner = Planner(shape, device, _sampler(config, device), fused, packs)
        fit = planner.choose(config)
        if fit is None:
            raise UserError(refusal(planner, config))
        longest_context = planner.longest_context(config)
        too_large = None if fit.fits else refusal(planner, config)
        disk = DiskSpace.of(config, work, fit, shape.vocabulary)
        if not device.on_cpu:
            resolved = {"train": {"micro_batch_size": fit.micro_batch_size}}
            config = replace(config, {**resolved, "model": {"gpu_memory_share": fit.gpu_memory_share}})
    return config, Plan(
        model=config.model.name,
        engine=engine,
        work=work,
        derived=tuple(derived),
        assumptions=tuple(_assumptions(config, device, source, is_present=is_present)),
        not_planned=not_planned,
        shape=shape,
        fit=fit,
        longest_context=longest_context,
        disk=disk,
        too_large=too_large,
        resumed=invocation.resume,
    )


def _read_model(config: RunConfig, *, planning: bool) -> tuple[Mapping[str, Any], str | None]:
    """Return the model's config.json and, if it is not the model's own, an assumption.

    Raises:
        UserError: the model cannot be trained, or its config.json cannot be read.
    """
    name, source = config.model.name, None
    try:
        model: Mapping[str, Any] = model_files.read_config(config.model)
    except model_files.HubUnavailable as error:
        if not planning or name not in KNOWN_MODELS:
            raise
        model = KNOWN_MODELS[name].config
        source = f"the dimensions of {name} come from the kit, not from its config.json: {error.__cause__}"
    check_architecture(model, config.model, config.lora.targets)
    return model, source


def _read_shape(
    model: Mapping[str, Any], config: RunConfig, device: Device, derived: Sequence[str]
) -> tuple[Shape | None, str | None]:
    """Return the model's shape, or why its memory cannot be planned.

    Raises:
        UserError: the shape is unknown, and `derived` settings need it.
    """
    if device.on_cpu and uses_vllm(config) and not config.sampling.server_url:
        return None, "vLLM's memory on a CPU is unknown"
    try:
        return Shape.of(model), None
    except UnknownFamily as error:
        if derived:
            raise UserError(f"{error}; pass {' and '.join(map(flag, derived))}") from None
        return None, str(error)


def _find_device(config: RunConfig, *, planning: bool) -> tuple[Device, bool]:
    """Return the device to plan for, and whether it is present."""
    gpus, _ = hardware.nvidia_gpus()
    if gpus:
        total = int(gpus[0].memory_gib * GIB)
        # Processes that start at different times see different free memory but must compute the same plan.
        free = total if distributed.world_size() > 1 else int(gpus[0].free_gib * GIB)
        return Device(gpus[0].name, total, free), True
    if planning and (gigabytes := hardware.preset_gigabytes(config.preset)):
        return Device(f"a GPU with {gigabytes} GB", gigabytes * GIB, gigabytes * GIB), False
    return Device("this machine", *hardware.machine_memory(), on_cpu=True), True


def _sampler(config: RunConfig, device: Device) -> memory.SamplerKind:
    """Return the sampler. On a CPU, the built-in sampler uses a merged copy of the model, except with DoRA."""
    return "merged" if device.on_cpu and not config.lora.dora else local_sampler(config)


def _assumptions(config: RunConfig, device: Device, source: str | None, *, is_present: bool) -> Iterator[str]:
    """Yield the assumptions of the plan. `source` is one if the model's dimensions are not its own."""
    if source:
        yield source
    if not is_present:
        yield f"the GPU has {device.total / GIB:g} GiB, all of it free; no GPU was found on this machine"
        yield "engine and sampling backend are those of the `gpu` extra, unless the settings name them"
    yield "every prompt and every completion has its maximum length"
    if config.data.filter_by_difficulty:
        yield "the samples for --data.filter-by-difficulty are not included"
    if config.monitor.rows:
        yield f"validation (at most {config.monitor.rows} rows) is not included in the work"
    if config.sampling.server_url:
        yield "the vLLM server's own memory is not included"
    yield f"{USABLE_SHARE:g} of the free memory is usable; libraries, CUDA and vLLM take fixed amounts (guesses)"
    yield "docs/before-you-train.md lists the size of each part, and what was measured"
