"""The GPUs that nvidia-smi lists, and whether their driver can run the installed PyTorch.

This file uses only the standard library and loads no torch: scripts/install.sh runs it before anything is installed.

    python lora_grpo/hardware/nvidia.py 13     # exit code 2 and one line if the driver is too old for CUDA 13
    python lora_grpo/hardware/nvidia.py        # prints the EXTRA that runs here, and on stderr why
"""

import ctypes
import functools
import importlib.machinery
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_OLDEST_ON_CUDA_13 = (7, 5)
"""Compute capability of the oldest GPUs that CUDA 13 supports (Turing)."""
_TOO_NEW_FOR_CUDA_12 = (10, 0)
"""Compute capability of the oldest GPUs that PyTorch's CUDA 12.6 build does not support (Blackwell)."""
MIN_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA: the oldest driver that runs programs built for it, of any minor version.

Source: NVIDIA's CUDA Compatibility, "Minor Version Compatibility"."""
_WSL_LIBRARIES = "/usr/lib/wsl/lib"
"""Windows puts its driver's nvidia-smi here. Login shells have it on the PATH; ssh, cron and sudo do not."""
_MEMORY_OF_MACHINE = Path("/proc/meminfo")
_AMD_DRIVER = Path("/dev/kfd")
"""The device through which programs compute on AMD GPUs. The driver makes it if there is one."""
_ON_AMD = (
    "the AMD GPU of this machine is not supported: Unsloth, vLLM and the presets for GPUs need an NVIDIA GPU; PEFT "
    "with the built-in sampler may work on PyTorch's ROCm build with --preset starter, untested"
)
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
"""What nvidia-smi is asked for; memory in MiB."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    free_gib: float
    driver: str = ""
    """Version of the NVIDIA driver, e.g. 580.65.06."""
    compute_capability: tuple[int, int] | None = None
    """(8, 9) for compute capability 8.9. None: unknown."""
    is_unified: bool = False
    """Whether the memory is the machine's, which the CPU also uses, as in a DGX Spark."""


def nvidia_gpus(*, refresh: bool = False) -> tuple[list[Gpu], str]:
    """Return the GPUs that are visible to a CUDA program, and the reason if there are none.

    The output of nvidia-smi is cached, because each call can take a second; `refresh` calls it again.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if visible in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides every GPU"
    tool = _tool()
    if tool is None and _AMD_DRIVER.exists():
        return [], _ON_AMD
    if tool is None:
        return [], f"nvidia-smi is not on the PATH; for a GPU, {_install_driver()}"
    if refresh:
        _query.cache_clear()
    output, failure = _query(tool)
    listed = _parse(output)
    if not listed:
        return [], failure or "nvidia-smi lists no GPU"
    if visible == "all" or "MIG-" in visible:  # nvidia-smi does not list MIG slices as separate GPUs
        return [entry.gpu for entry in listed], ""

    # The GPUs that CUDA_VISIBLE_DEVICES names, in its order.
    gpus: list[Gpu] = []
    for name in visible.split(","):
        named = [entry.gpu for entry in listed if entry.is_named(name)]
        if not named:  # like CUDA, stop at the first that does not exist
            break
        gpus += named
    if not gpus:
        return [], f"CUDA_VISIBLE_DEVICES={visible} matches none of the {len(listed)} GPUs"
    return gpus, ""


@dataclass(frozen=True)
class _ListedGpu:
    """A line of nvidia-smi."""

    index: str
    uuid: str
    gpu: Gpu

    def is_named(self, name: str) -> bool:
        """Return whether an entry of CUDA_VISIBLE_DEVICES, an index or a part of a UUID, names this GPU."""
        return name == self.index or (name.startswith("GPU-") and name in self.uuid)


def _parse(output: str) -> list[_ListedGpu]:
    """Return the GPUs that nvidia-smi lists; see `_FIELDS`."""
    listed = []
    for line in output.splitlines():
        values = line.split(", ")
        values += [""] * (len(_FIELDS) - len(values))  # older versions print fewer fields
        index, uuid, name, total_mib, free_mib, driver, capability, *_ = values
        is_unified = total_mib == "[N/A]"  # the GPU has no memory of its own
        if is_unified:
            total_gib, free_gib = _machine_memory_gib()
        elif total_mib.isdigit():
            total_gib = free_gib = int(total_mib) / 1024
            if free_mib.isdigit():
                free_gib = int(free_mib) / 1024
        else:  # nvidia-smi also prints warnings
            continue
        gpu = Gpu(
            name=name,
            memory_gib=total_gib,
            free_gib=free_gib,
            driver=driver,
            compute_capability=_parse_capability(capability),
            is_unified=is_unified,
        )
        listed.append(_ListedGpu(index, uuid, gpu))
    return listed


def _machine_memory_gib() -> tuple[float, float]:
    """Return the machine's total memory and what is available without swapping, as Linux tells them."""
    sizes = {}
    for line in _MEMORY_OF_MACHINE.read_text(encoding="utf-8").splitlines():
        name, _, size = line.partition(":")
        sizes[name] = size
    total, available = (int(sizes[name].removesuffix("kB")) for name in ("MemTotal", "MemAvailable"))
    return total / 1024**2, available / 1024**2


def _parse_capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    if major.isdigit() and minor.isdigit():
        return int(major), int(minor)
    return None


def driver_problem(gpu: Gpu, cuda: int | None = None) -> str:
    """Return in one line why this GPU or its driver cannot run a CUDA version, and the fix; empty if it can.

    Args:
        cuda: major version of CUDA. None: that of the installed PyTorch.
    """
    needed_by = "requirements-gpu.lock"
    if cuda is None:
        version, cuda = _torch_build()
        needed_by = f"torch {version}"
    capability = gpu.compute_capability or _OLDEST_ON_CUDA_13
    on_cuda_12 = "run PEFT on CUDA 12: `make install EXTRA=cuda12` (docs/gpu.md)"

    # A GPU that CUDA 13 no longer supports.
    if cuda > 12 and capability < _OLDEST_ON_CUDA_13:
        level = ".".join(map(str, capability))
        return (
            f"{gpu.name} has compute capability {level}; CUDA 13, which {needed_by} needs, runs from 7.5; {on_cuda_12}"
        )

    # A driver that is new enough, or unknown. A forward-compatibility package gives an older driver of a data-center
    # GPU a newer libcuda.
    major = gpu.driver.partition(".")[0]
    if not major.isdigit() or int(major) >= MIN_DRIVER.get(cuda, 0) or _libcuda_version() >= cuda:
        return ""

    # PyTorch's CUDA 12.6 build supports compute capability 5.0 to 9.0.
    fix = _install_driver(cuda)
    if cuda > 12 and int(major) >= MIN_DRIVER[12] and capability < _TOO_NEW_FOR_CUDA_12:
        fix += f"; or {on_cuda_12}"
    return f"NVIDIA driver {gpu.driver} cannot run CUDA {cuda}, which {needed_by} needs; {fix}"


def choose_extra() -> tuple[str, str]:
    """Return the EXTRA of scripts/install.sh that runs on this machine, and what it is and why in one line."""
    gpus, why_none = nvidia_gpus()
    on_cpu = "the CPU build of PyTorch"
    if not gpus:
        return "", f"{on_cpu}: {why_none}"
    gpu = gpus[0]
    problem = driver_problem(gpu, cuda=13)
    if not problem:
        return ",gpu", f"PyTorch with CUDA 13, Unsloth and vLLM: {gpu.name}, driver {gpu.driver}"
    if not driver_problem(gpu, cuda=12) and (gpu.compute_capability or (0, 0)) < _TOO_NEW_FOR_CUDA_12:
        return "cuda12", f"PyTorch with CUDA 12.6, PEFT without Unsloth and vLLM: {gpu.name}, driver {gpu.driver}"
    return "", f"{on_cpu}: {problem}"


def _tool() -> str | None:
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_WSL_LIBRARIES)


@functools.cache
def _query(tool: str) -> tuple[str, str]:
    """Return the output of nvidia-smi, and the reason if it failed."""
    command = [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi did not answer ({type(error).__name__})"
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = f"exit code {result.returncode}"
        if lines:
            reason = lines[0].rstrip(".")
        return "", f"nvidia-smi failed: {reason}; {_install_driver()}, or restart after an update of the driver"
    return result.stdout, ""


def _install_driver(cuda: int = 13) -> str:
    where = " on Windows (not in WSL2)" if "microsoft" in platform.release().lower() else ""
    return f"install NVIDIA driver {MIN_DRIVER[cuda]} or newer{where}"


def _torch_build() -> tuple[str, int]:
    """Return the version of the installed PyTorch and the major version of its CUDA, 0 for a build without CUDA.

    Read from torch/version.py: the metadata of the build on PyPI does not name its CUDA version.
    """
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", 0
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    version = ""
    version_match = re.search(r"__version__ = '(.+)'", text)
    if version_match:
        version = version_match[1]
    cuda = 0
    cuda_match = re.search(r"^cuda\b.*= '(\d+)", text, re.MULTILINE)
    if cuda_match:
        cuda = int(cuda_match[1])
    return version, cuda


def _libcuda_version() -> int:
    """Return the major version of CUDA that libcuda supports, 0 without libcuda. Does not initialize CUDA."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value // 1000


def _check_before_install(cuda: int) -> int:
    """Print what is wrong with the driver, and return an exit code: 2 if the driver is too old for `cuda`."""
    gpus, why_none = nvidia_gpus()
    if not gpus:
        if _tool():
            print(f"note: no NVIDIA GPU ({why_none})", file=sys.stderr)
        return 0
    problem = driver_problem(gpus[0], cuda)
    if problem:
        print(f"error: {problem}; to install anyway, set ANY_DRIVER=1", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(_check_before_install(int(sys.argv[1])))
    extra, reason = choose_extra()
    print(f"installing {reason}", file=sys.stderr)
    print(extra)
