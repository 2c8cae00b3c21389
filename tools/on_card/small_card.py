"""A small card inside a large one: what is left beside a balloon, and what programs are told about it.

A balloon is a process that holds the rest of the large card with `cudaMalloc`. It limits everything: torch, vLLM's own
pools, CUDA graphs and contexts. Programs would still see the total memory of the large card, from which vLLM computes
its part, so they are told the small card's total:

- nvidia-smi is a script that replaces the total in the answer of the real one;
- `cudaMemGetInfo` of compiled programs is that of mem_get_info.c, by LD_PRELOAD, unless CUDA's runtime is inside them;
- torch's and NVML's answers in Python are replaced by `tell_python`.

The compute capability, the speed and the number of multiprocessors stay those of the large card.

Without a GPU (`tiny`), there is no balloon and no nvidia-smi to ask: the script prints a made-up card.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError

GIB = 1024**3
_MIB = 1024**2
_BYTES = "SMALL_CARD_BYTES"
"""Environment variable with the memory that CUDA reports."""
_TOTAL_FIELD = 4
"""Of the fields that lora_grpo asks nvidia-smi for, `memory.total`; `memory.free` is the next one."""
_SLACK_BYTES = 16 * _MIB
"""A balloon may leave this much more than it was asked for."""


@dataclass(frozen=True)
class SmallCard:
    name: str
    listed_mib: int
    """The total that nvidia-smi lists."""
    usable_gib: float
    """The total that CUDA reports: the driver keeps some."""

    @property
    def usable_bytes(self) -> int:
        return int(self.usable_gib * GIB)


CARDS = {
    "8gb": SmallCard("RTX 4060", 8188, 7.63),
    "12gb": SmallCard("RTX 3060", 12288, 11.63),
    "16gb": SmallCard("RTX 4080", 16376, 15.69),
    "24gb": SmallCard("RTX 4090", 24564, 23.64),
}
"""The smallest card that each preset is chosen for; sizes as in tests/helpers/gpus.py."""


@contextlib.contextmanager
def inside(card: SmallCard, folder: Path, *, tiny: bool) -> Iterator[dict[str, str]]:
    """Inflate the balloon, and yield the environment variables of a program that shall see the small card.

    Args:
        folder: where the script and the compiled part are written.
    """
    variables = {_BYTES: str(card.usable_bytes)}
    scripts = folder / "small-card"
    scripts.mkdir(parents=True, exist_ok=True)
    _write_nvidia_smi(scripts / "nvidia-smi", card, None if tiny else shutil.which("nvidia-smi"))
    variables["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("gcc"):
        variables["LD_PRELOAD"] = str(compile_shim(scripts))
    if tiny:
        yield variables
        return
    with _balloon(card.usable_bytes):
        yield variables


def compile_shim(folder: Path) -> Path:
    """Compile mem_get_info.c and return the library."""
    library = folder / "mem_get_info.so"
    source = Path(__file__).with_name("mem_get_info.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def _write_nvidia_smi(script: Path, card: SmallCard, real: str | None) -> None:
    if real is None:
        lines = [f"echo '0, GPU-0, {card.name}, {card.listed_mib}, {card.listed_mib - 500}, 580.00, 8.9'"]
    else:
        total = f"${_TOTAL_FIELD} = {card.listed_mib}"
        free = f"if (${_TOTAL_FIELD + 1} > {card.listed_mib}) ${_TOTAL_FIELD + 1} = {card.listed_mib}"
        lines = [f"'{real}' \"$@\" | awk -F ', ' -v OFS=', ' 'NF > 4 {{ {total}; {free} }} {{ print }}'"]
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    script.chmod(0o755)


@contextlib.contextmanager
def _balloon(left_bytes: int) -> Iterator[None]:
    """Leave this many bytes of the GPU's memory free while the block runs."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(left_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        answer = process.stdout.readline().split()
        if not answer:
            raise RunError("the balloon took no memory; see its error above")
        free_bytes = int(answer[0])
        if free_bytes > left_bytes + _SLACK_BYTES:
            raise RunError(f"the balloon leaves {free_bytes / GIB:.2f} GiB, expected {left_bytes / GIB:.2f}")
        yield
    finally:
        process.stdin.close()  # the balloon waits for this
        process.wait()


def _inflate(left_bytes: int) -> None:
    """Take the memory, print the bytes that are still free, and hold it until stdin is closed."""
    import torch

    held = []
    # The first allocation makes the context, which also takes memory.
    while (surplus := torch.cuda.mem_get_info()[0] - left_bytes) > _SLACK_BYTES:
        held.append(torch.empty(surplus, dtype=torch.uint8, device="cuda"))
    print(torch.cuda.mem_get_info()[0], flush=True)
    sys.stdin.read()


def tell_python() -> None:
    """Have torch and vLLM's NVML report the small card of the environment, if there is one."""
    if _BYTES not in os.environ:
        return
    total = int(os.environ[_BYTES])
    import torch

    _replace_memory_info(torch.cuda, "mem_get_info", total)
    _replace_memory_info(torch.accelerator, "get_memory_info", total)
    _replace_properties(torch.cuda, total)
    sys.meta_path.insert(0, _NvmlFinder(total))


class _NvmlFinder(importlib.abc.MetaPathFinder):
    """Replaces an answer of vLLM's copy of NVML's bindings when they are imported: some things must be before that."""

    def __init__(self, total: int) -> None:
        self._total = total

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "vllm.third_party.pynvml":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_replace(module: types.ModuleType) -> None:
                execute(module)
                _replace_nvml(module, self._total)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace_memory_info(module: Any, name: str, total: int) -> None:
    original = getattr(module, name)

    def memory_info(*args: Any, **kwargs: Any) -> tuple[int, int]:
        free, real_total = original(*args, **kwargs)
        return min(free, total), min(real_total, total)

    setattr(module, name, memory_info)


def _replace_properties(cuda: Any, total: int) -> None:
    original = cuda.get_device_properties

    def properties(*args: Any, **kwargs: Any) -> Any:
        real = original(*args, **kwargs)
        values = {name: getattr(real, name) for name in dir(real) if not name.startswith("_")}
        return types.SimpleNamespace(**{**values, "total_memory": min(real.total_memory, total)})

    cuda.get_device_properties = properties


def _replace_nvml(pynvml: Any, total: int) -> None:
    original = pynvml.nvmlDeviceGetMemoryInfo

    def memory_info(*args: Any, **kwargs: Any) -> Any:
        real = original(*args, **kwargs)
        return types.SimpleNamespace(total=min(real.total, total), free=min(real.free, total), used=real.used)

    pynvml.nvmlDeviceGetMemoryInfo = memory_info


if __name__ == "__main__":
    _inflate(int(sys.argv[1]))
