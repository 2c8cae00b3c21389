"""Detects this machine's GPU and memory without importing torch, and chooses the preset and the engines for it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import psutil

from lora_grpo import distributed
from lora_grpo.config.schema import RunConfig, replace
from lora_grpo.errors import UserError

_USABLE_SHARE = 0.9
"""A preset fits a GPU with at least this fraction of the size in its name: a "16 GB" GPU reports 15 to 16 GiB."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    free_gib: float
    driver: str = ""
    """Version of the NVIDIA driver, e.g. 580.65.06."""
    compute_capability: tuple[int, int] | None = None
    """(8, 9) for compute capability 8.9. None: unknown."""


def nvidia_gpus(*, refresh: bool = False) -> tuple[list[Gpu], str]:
    """Return the GPUs that are visible to a CUDA program, and the reason if there are none.

    The output of nvidia-smi is cached, because each call can take a second; `refresh` calls it again.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if visible in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], "nvidia-smi is not on the PATH"
    if refresh:
        _query.cache_clear()
    output, failure = _query(tool)
    listed: dict[tuple[str, str], Gpu] = {}
    for line in output.splitlines():
        index, uuid, name, total, free, driver, capability, *_ = [*line.split(", "), *[""] * 7]
        if total.isdigit():  # nvidia-smi also prints warnings
            major, _, minor = capability.partition(".")
            level = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
            free_mib = int(free if free.isdigit() else total)
            listed[index, uuid] = Gpu(name, int(total) / 1024, free_mib / 1024, driver, level)
    if not listed:
        return [], failure or "nvidia-smi lists no GPU"
    if visible == "all" or "MIG-" in visible:  # nvidia-smi does not list MIG slices as separate GPUs
        return [*listed.values()], ""
    gpus = []
    for name in visible.split(","):
        matching = [
            gpu for (index, uuid), gpu in listed.items() if name == index or (name[:4] == "GPU-" and name in uuid)
        ]
        if not matching:  # like CUDA, stop at the first that does not exist
            break
        gpus += matching
    return gpus, "" if gpus else f"CUDA_VISIBLE_DEVICES={visible} matches none of the {len(listed)} GPUs"


@functools.cache
def _query(tool: str) -> tuple[str, str]:
    """Return the output of nvidia-smi, and the reason if it failed."""
    fields = "--query-gpu=index,uuid,name,memory.total,memory.free,driver_version,compute_cap"
    command = [tool, fields, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi did not answer ({type(error).__name__})"
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        return "", f"nvidia-smi failed: {lines[0] if lines else f'exit code {result.returncode}'}"
    return result.stdout, ""


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
    return int(preset.removesuffix("gb")) if preset.removesuffix("gb").isdigit() else None


def choose_preset(requested: str, presets: Iterable[str], *, planning: bool = False) -> tuple[str, str]:
    """Return the requested preset, or the one that `auto` means on this machine, and the reason in one line.

    With `planning`, a machine without a GPU is assumed to have one with the memory that the preset is named after.
    """
    names = list(presets)
    if requested not in (*names, "auto"):
        raise UserError(f"unknown preset {requested!r}; expected auto, {', '.join(names)}")
    size = preset_gigabytes(requested)
    if size is None and requested != "auto":
        return requested, f"preset {requested} (requested)"
    gpus, why_none = nvidia_gpus()
    if not gpus:
        if size is None:
            on_cpu = next(name for name in names if preset_gigabytes(name) is None)
            return on_cpu, f"preset {on_cpu}: no NVIDIA GPU ({why_none})"
        if planning:
            return requested, f"preset {requested} (requested), planned for a GPU with {size} GB: none found"
        raise UserError(
            f"preset {requested} needs an NVIDIA GPU with {size} GB and found none ({why_none}); "
            "pass --preset starter for the CPU"
        )
    gpu = f"{gpus[0].name} with {gpus[0].memory_gib:.0f} GiB"
    sizes = {name: preset_gigabytes(name) or 0 for name in names}
    fitting = [name for name in names if gpus[0].memory_gib >= sizes[name] * _USABLE_SHARE]
    if requested in fitting:
        return requested, f"preset {requested} (requested) on {gpu}"
    largest = max(fitting, key=sizes.__getitem__)
    if size is not None:
        raise UserError(f"preset {requested} needs a GPU with {size} GB, got {gpu}; pass --preset {largest}")
    return largest, f"preset {largest}: {gpu}"


def vllm_available() -> bool:
    return importlib.util.find_spec("vllm") is not None


def choose_engine(config: RunConfig) -> Literal["peft", "unsloth"]:
    """Return the training engine. `auto` is Unsloth if it is installed and a single process trains on a GPU."""
    if config.model.engine != "auto":
        return config.model.engine
    can_use = _supports_unsloth(config) and nvidia_gpus()[0] and importlib.util.find_spec("unsloth")
    return "unsloth" if can_use else "peft"


def uses_vllm(config: RunConfig) -> bool:
    """Return whether vLLM samples the rollouts. `auto` is vLLM if it is installed, there is a GPU, and DoRA is off."""
    if config.sampling.server_url:
        return True
    if config.sampling.backend != "auto":
        return config.sampling.backend == "vllm"
    return vllm_available() and bool(nvidia_gpus()[0]) and not config.lora.dora


def local_sampler(config: RunConfig) -> Literal["transformers", "vllm", "shared"]:
    """Return the sampler that runs on this machine; `shared` is Unsloth's vLLM, which shares the trained weights."""
    if config.sampling.server_url or not uses_vllm(config):
        return "transformers"
    return "shared" if choose_engine(config) == "unsloth" else "vllm"


def with_gpu_defaults(config: RunConfig) -> RunConfig:
    """Return the configuration with `auto` resolved as on a machine with a GPU and the `gpu` extra."""
    engine, backend = config.model.engine, config.sampling.backend
    if engine == "auto":
        engine = "unsloth" if _supports_unsloth(config) else "peft"
    if backend == "auto":
        backend = "transformers" if config.lora.dora else "vllm"
    resolved: RunConfig = replace(config, {"model": {"engine": engine}, "sampling": {"backend": backend}})
    return resolved


def _supports_unsloth(config: RunConfig) -> bool:
    # Unsloth's trainer computes the KL penalty against the base, not against the adapter that a run starts from.
    other_reference = config.lora.from_ and config.train.beta
    return distributed.world_size() == 1 and not config.sampling.server_url and not other_reference
