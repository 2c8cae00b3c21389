"""`accelerate launch --cpu --num_processes N` does what it says."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from lora_grpo import ranks
from lora_grpo.errors import UserError

_RANKED_BY = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_COUNTED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SAVING_SECONDS = 600
"""How long torchrun waits for ranks that it told to stop: the rest of a step, and a checkpoint. Its default is 30."""


def start_ranks() -> None:
    """Become the processes that `accelerate launch --cpu --num_processes N` was asked for, if it has started one alone.

    accelerate 1.15 gives every --cpu command without --mpirun_hostfile to its launcher of single processes
    (`simple_launcher`), which sets MASTER_ADDR and MASTER_PORT for N processes and starts one, in silence. This process
    is then replaced by torchrun with the same script and arguments.

    Raises:
        UserError: the number cannot be read, or a launcher was used that the kit does not know.
    """
    if any(name in os.environ for name in _RANKED_BY):
        return
    script = list(sys.argv)
    by_mpi = [name for name in _COUNTED_BY_MPI if os.environ.get(name, "1") != "1"]
    if by_mpi:
        raise UserError(f"started by MPI ({by_mpi[0]}); use torchrun: {_command(os.environ[by_mpi[0]], script)}")
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("true", "1") or "MASTER_ADDR" not in os.environ:
        return
    asked = processes_asked(_words_of(os.getppid()), sys.argv[0])
    if asked is None:
        raise UserError(
            "accelerate started one process where several were asked for, and their number cannot be read; "
            f"use torchrun: {_command('N', script)}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # --cpu
    if asked == 1:
        return
    print(f"accelerate started one process of {asked}; going on as {asked}, by torchrun", file=sys.stderr, flush=True)
    here = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    here.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVING_SECONDS))
    os.execve(sys.executable, [sys.executable, *ranks.launcher(asked), *script], here)


def processes_asked(words: Sequence[str], script: str) -> int | None:
    """Return the number of processes that an `accelerate launch` command asks for, of one machine.

    Args:
        words: the command.
        script: the script that it starts; what comes after it is the script's.

    Returns:
        The number; None where it is not there, or is that of several machines.
    """
    own = "\n".join(words[: words.index(script)] if script in words else words)
    given = {
        name.replace("-", "_"): value for name, value in re.findall(r"^--([\w-]+)[=\n](?!--)(.+)$", own, re.MULTILINE)
    }
    with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):
        if "config_file" in given:
            given = {**yaml.safe_load(Path(given["config_file"]).read_text(encoding="utf-8")), **given}
    processes, machines = str(given.get("num_processes")), str(given.get("num_machines", 1))
    return int(processes) if processes.isdecimal() and machines == "1" else None


def _words_of(process: int) -> list[str]:
    """Return the command of a process, or nothing where it cannot be seen."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return []
    return command.decode(errors="replace").split("\0")


def _command(processes: str, script: Sequence[str]) -> str:
    return " ".join(["python", *ranks.launcher(1)[:-1], processes, *script])
