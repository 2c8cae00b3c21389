"""A smaller card than the one at hand: another process holds the rest of its memory, and its total is told smaller.

Torch's own limit on a process does not serve: it counts what vLLM gave back in its sleep as still taken, and does not
count CUDA's context. Here the memory is really gone, for every allocator. What still sees the whole card: torch's
device properties and the driver's library, by which vLLM chooses how much it reads at once.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lora_grpo.config import hardware
from lora_grpo.errors import RunError

_GIB = 1 << 30
_HOLD = "import sys; from lora_grpo.pretended_card import hold; hold(float(sys.argv[1]))"
_RUN = "import sys; from lora_grpo.pretended_card import run; run(float(sys.argv[1]), sys.argv[2:])"


def command(gib: float, script: Path, arguments: list[str]) -> list[str]:
    """Return the command that runs a script as if the card had this much memory."""
    return [sys.executable, "-c", _RUN, str(gib), str(script), *arguments]


@contextlib.contextmanager
def rest_held(gib: float) -> Iterator[None]:
    """Leave this much of the card's memory free while the block runs; the rest is held by a process that ends with it.

    Raises:
        RunError: the memory could not be held.
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(gib)],
        stdin=subprocess.PIPE,  # it ends when this closes, also when this process is killed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is this process's to handle
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        said = ""
        for line in holder.stdout:
            if line == "held\n":
                break
            said = line.strip() or said
        else:
            raise RunError(f"the card's memory above {gib:g} GiB could not be held: {said or 'no reason was given'}")
        yield
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


def hold(gib: float) -> None:
    """Take memory until this much of the card is free, say so, and keep it until standard input ends."""
    hardware.use_one_gpu()
    import torch

    held, free = [], torch.cuda.mem_get_info()[0]
    while free > gib * _GIB:
        held.append(torch.empty(min(int(free - gib * _GIB), 8 * _GIB), dtype=torch.uint8, device="cuda"))
        left = torch.cuda.mem_get_info()[0]
        if left >= free:  # less than the allocator takes at a time
            break
        free = left
    print("held", flush=True)
    sys.stdin.read()


def run(gib: float, script_and_arguments: list[str]) -> None:
    """Run a script in this process, in which the card has this much memory.

    Args:
        gib: the pretended total.
        script_and_arguments: what would follow `python` on a command line.
    """
    pretend(gib)
    sys.argv[:] = script_and_arguments
    sys.path.insert(0, str(Path(script_and_arguments[0]).parent))
    runpy.run_path(script_and_arguments[0], run_name="__main__")


def pretend(gib: float) -> None:
    """Tell this process a smaller total where the kit, vLLM and Unsloth ask for it, before any of them is imported."""
    hardware.use_one_gpu()
    found = hardware.nvidia_gpus

    @functools.wraps(found)
    def gpus() -> tuple[list[hardware.Gpu], str]:
        real, why_none = found()
        return [hardware.Gpu(gpu.name, min(gpu.memory_gib, gib), min(gpu.free_gib, gib)) for gpu in real], why_none

    hardware.nvidia_gpus = gpus
    from lora_grpo.models import wait_without_spinning

    wait_without_spinning()
    import torch

    told = _told_smaller(torch.cuda.mem_get_info, int(gib * _GIB))
    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = told
    if hasattr(torch.accelerator, "get_memory_info"):  # vLLM 0.27 asks here
        torch.accelerator.get_memory_info = _told_smaller(torch.accelerator.get_memory_info, int(gib * _GIB))


def _told_smaller(info: Callable[..., tuple[int, int]], size: int) -> Callable[..., tuple[int, int]]:
    @functools.wraps(info)
    def told(*arguments: Any, **named: Any) -> tuple[int, int]:
        free, total = info(*arguments, **named)
        return min(free, size), min(total, size)

    return told
