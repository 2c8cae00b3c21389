"""Several processes that train one adapter: which one this is, and how they wait for each other.

A launcher such as torchrun starts the same command once per process (rank) and numbers the processes in the
environment. Each rank samples and learns from its share of a step's completions. DDP sums the gradients, so that all
adapters stay equal. Rank 0 alone writes files and prints. Without a launcher there is one rank, and every function here
returns at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lora_grpo.errors import UserError

T = TypeVar("T")

_STEP_TIMEOUT = timedelta(minutes=30)
"""How long a gradient waits for the other ranks' before it is an error; transformers' default."""
_WAIT_TIMEOUT = timedelta(days=30)
"""How long ranks wait for each other outside a step, for example in an evaluation."""
_HOLD_SECONDS = 3.0
"""How long an error waits for rank 0 to print the same one."""
_ERROR = "lora_grpo/error"


def world_size() -> int:
    """Return the number of ranks.

    Raises:
        UserError: `WORLD_SIZE`, which launchers set, is not a positive integer.
    """
    return _from_environment("WORLD_SIZE", 1)


def rank() -> int:
    """Return the number of this rank, from 0.

    Raises:
        UserError: `RANK`, which launchers set, is not an integer.
    """
    return _from_environment("RANK", 0)


def is_main() -> bool:
    """Return whether this is rank 0, which writes files and prints."""
    return rank() == 0


def launcher(processes: int) -> list[str]:
    """Return the Python arguments that start a script as several ranks on this machine."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def join() -> None:
    """Connect to the other ranks and select this one's GPU; called before a model is loaded, after torch's import.

    Raises:
        UserError: there are fewer GPUs than ranks, or the environment does not number this rank.
    """
    if world_size() == 1 or _group:
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"the environment has WORLD_SIZE={world_size()} and no {missing[0]}; start several processes by torchrun "
            f"(python {' '.join(launcher(world_size()))} ...), or unset WORLD_SIZE"
        )
    import torch
    from accelerate import PartialState

    on_gpu = torch.cuda.is_available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu and torch.cuda.device_count() < here:
        raise UserError(
            f"{here} processes were started for {torch.cuda.device_count()} GPUs; start one per GPU (--nproc-per-node)"
        )
    if not on_gpu:
        # accelerate 1.15 calls a rank's device `cpu:0`, to which torch.load (2.13) cannot restore an optimizer.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # The Trainer uses Accelerate's state, which sets this rank's device and opens NCCL, or gloo on a CPU.
    # Ranks connect inside torch's C++ code, which calls no Python signal handler; nothing is written yet.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    PartialState(cpu=not on_gpu, timeout=_STEP_TIMEOUT)
    # Ranks wait in gloo on any machine: waiting in NCCL keeps the GPU busy and times out.
    _group.append(torch.distributed.new_group(backend="gloo", timeout=_WAIT_TIMEOUT))
    signal.signal(signal.SIGTERM, handler)


def leave() -> None:
    """Disconnect from the other ranks, at the end of the command."""
    if _group:
        import torch

        barrier()
        _group.clear()
        torch.distributed.destroy_process_group()


def barrier() -> None:
    """Return when every rank has called this."""
    if _group:
        import torch

        waiting, pause = torch.distributed.barrier(group=_group[0], async_op=True), 0.001
        # Poll, so that signals are handled; gloo's own wait would delay them until its end.
        while not waiting.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        waiting.wait()


def broadcast_from_main(make: Callable[[], T]) -> T:
    """Return on every rank what rank 0 returns from `make`, which it calls once all ranks are here."""
    barrier()
    made = [make() if is_main() else None]
    barrier()
    if _group:
        import torch

        torch.distributed.broadcast_object_list(made, src=0, group=_group[0])
    return made[0]  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """Return every rank's value, on every rank, in the order of ranks."""
    if not _group:
        return [value]
    barrier()
    import torch

    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value, group=_group[0])
    return values


@contextlib.contextmanager
def silence_other_processes() -> Iterator[None]:
    """Discard what other ranks print within the block, because rank 0 prints the same."""
    if world_size() > 1:
        # DDP's reducer warns on every rank about a setting of `grpo_arguments`. Read when torch is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if is_main():
        yield
        return
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def report_error(message: str) -> None:
    """Leave this rank's error for the ranks that fail because of it."""
    if _group and reported_error() is None:
        with contextlib.suppress(RuntimeError):  # the launcher, which keeps the store, is gone
            _store().set(_ERROR, message)


def reported_error() -> str | None:
    """Return the error that a rank failed with, if one did."""
    if _group:
        with contextlib.suppress(RuntimeError):
            if _store().check([_ERROR]):
                return str(_store().get(_ERROR).decode())
    return None


def wait_for_main_error() -> None:
    """Wait, on other ranks, before printing an error: if rank 0 fails too, its launcher ends this rank here."""
    if not is_main():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_HOLD_SECONDS)


def _from_environment(name: str, smallest: int) -> int:
    value = os.environ.get(name, str(smallest))
    if not value.isdecimal() or int(value) < smallest:
        raise UserError(f"the environment has {name}={value!r}; expected an integer >= {smallest}, or unset it")
    return int(value)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


_group: list[Any] = []
"""The process group that ranks wait in, once this process has joined."""
