"""What this machine has, found without importing torch: the preset and its error message depend on it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.errors import UserError

STARTER_PRESET = "starter"
_USABLE_SHARE = 0.9
"""A "16 GB" card reports 15 to 16 GiB; a preset fits a card with at least this share of its name."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    free_gib: float
    """What no other program has taken."""


def nvidia_gpus() -> tuple[list[Gpu], str]:
    """Ask `nvidia-smi` for the GPUs that a CUDA program would see.

    Returns:
        The GPUs, and the reason in words when there is none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if visible in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], "nvidia-smi is not on the PATH"
    answer, failed = _asked(tool)
    if failed:
        return [], failed
    found: list[tuple[str, str, Gpu]] = []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 5 and parts[-2].isdigit():
            total = int(parts[-2]) / 1024
            free = int(parts[-1]) / 1024 if parts[-1].isdigit() else total
            found.append((parts[0], parts[1], Gpu(", ".join(parts[2:-2]), total, free)))
    if not found:
        return [], "nvidia-smi lists no GPU"
    if visible == "all" or "MIG-" in visible:  # a MIG slice is listed under its card alone
        return [gpu for *_, gpu in found], ""
    gpus = []
    for wanted in map(str.strip, visible.split(",")):
        fitting = [gpu for index, uuid, gpu in found if wanted == index or (wanted[:4] == "GPU-" and wanted in uuid)]
        if not fitting:  # CUDA, too, stops at the first that does not exist
            break
        gpus += fitting
    return gpus, "" if gpus else f"CUDA_VISIBLE_DEVICES={visible} names none of the {len(found)} that are there"


@functools.cache
def _asked(tool: str) -> tuple[str, str]:
    """Return what nvidia-smi says, or why it does not; once a process, before it takes any memory: each call can take
    a second."""
    query = [tool, "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi did not answer ({type(error).__name__})"
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        return "", f"nvidia-smi failed: {said[0] if said else f'exit code {answer.returncode}'}"
    return answer.stdout, ""


def machine_memory() -> tuple[int, int]:
    """Return the machine's memory and what of it can be had without swapping, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1024 * kilobytes["MemTotal"], 1024 * kilobytes["MemAvailable"]


def use_one_gpu() -> None:
    """Show CUDA the GPU that the preset was chosen for, and no other; to be called before torch is imported.

    Transformers' Trainer would otherwise take every GPU it sees into one process and multiply the batch. Of several
    processes (`WORLD_SIZE`) each takes its own; see `distributed.join`.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "WORLD_SIZE" not in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0].strip()


def preset_gigabytes(preset: str) -> int | None:
    """Return the card size that a preset is named after, e.g. 16 for `16gb`; None for `starter`."""
    return int(preset.removesuffix("gb")) if preset.removesuffix("gb").isdigit() else None


def choose_preset(wanted: str, presets: Iterable[str], *, planning: bool = False) -> tuple[str, str]:
    """Settle the preset on the hardware at hand.

    Args:
        wanted: a preset's name, or `auto`.
        presets: the recipe's presets: `starter`, and sizes such as `16gb`.
        planning: nothing will run: without a GPU, one of the size that the preset is named after is planned for.

    Returns:
        The preset, and one line that says why.

    Raises:
        UserError: the preset does not exist, or this machine cannot run it.
    """
    names = list(presets)
    sizes = sorted((size, name) for name in names if (size := preset_gigabytes(name)) is not None)
    if wanted not in names and wanted != "auto":
        raise UserError(f"unknown preset {wanted!r}; expected auto, {', '.join(names)}")
    if preset_gigabytes(wanted) is None and wanted != "auto":
        return wanted, f"preset {wanted} (asked for)"

    gpus, why_none = nvidia_gpus()
    if wanted == "auto":
        if not gpus:
            return STARTER_PRESET, f"preset {STARTER_PRESET}: no NVIDIA GPU ({why_none})"
        fitting = [name for size, name in sizes if gpus[0].memory_gib >= size * _USABLE_SHARE]
        if not fitting:
            return (
                STARTER_PRESET,
                f"preset {STARTER_PRESET}: {_describe(gpus[0])} is smaller than every GPU preset needs",
            )
        return fitting[-1], f"preset {fitting[-1]}: {_describe(gpus[0])}"

    size = preset_gigabytes(wanted) or 0
    if not gpus and planning:
        return wanted, f"preset {wanted} (asked for), planned for a GPU with {size} GB: none is here ({why_none})"
    if not gpus:
        raise UserError(
            f"preset {wanted} needs an NVIDIA GPU with {size} GB and found none ({why_none}); "
            f"pass --preset {STARTER_PRESET} for the CPU"
        )
    if gpus[0].memory_gib < size * _USABLE_SHARE:
        fitting = [name for other, name in sizes if gpus[0].memory_gib >= other * _USABLE_SHARE]
        raise UserError(
            f"preset {wanted} needs a GPU with {size} GB, got {_describe(gpus[0])}; "
            f"pass --preset {fitting[-1] if fitting else STARTER_PRESET}"
        )
    return wanted, f"preset {wanted} (asked for) on {_describe(gpus[0])}"


def _describe(gpu: Gpu) -> str:
    return f"{gpu.name} with {gpu.memory_gib:.0f} GiB"
