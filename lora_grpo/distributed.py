"""Data-parallel training: ranks, barriers, collectives and errors across processes.

A launcher such as torchrun starts the same command once per process (rank) and sets the rank in the environment. Each
rank samples and trains on its part of a step's completions. DDP all-reduces the gradients, so all adapters stay equal.
Only rank 0 writes files and prints. Without a launcher there is one rank, and every function here returns immediately.

    with distributed.member():                             # a command, or a call of the Python API
        distributed.join()                                 # before a model is loaded
        rows = distributed.own_share(all_rows)
        lines = distributed.join_shares(sample(rows))      # of all ranks, on every rank
        distributed.once(lambda: write(lines))             # on rank 0; the others wait

Code that has a run or its configuration does not think of ranks: it calls `Run.once` and reads `RunConfig.processes`.

Accelerate connects the ranks, sets their devices and disconnects them, and the trainers use its `Accelerator`. Outside
of a training step, its waits and collectives are not used: on GPUs they use NCCL, which keeps a waiting GPU busy, gives
up after 30 minutes, and delays signals. Here ranks wait with gloo, for days, and handle signals at once.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lora_grpo import console
from lora_grpo.errors import UserError

T = TypeVar("T")

_GRADIENT_TIMEOUT = timedelta(minutes=30)  # of a gradient all-reduce; transformers' default
_WAIT_TIMEOUT = timedelta(days=30)
_FIRST_POLL_SECONDS = 0.001
_LONGEST_POLL_SECONDS = 0.1
_LAUNCHER_SECONDS = 3
"""How long a failed rank waits for its launcher to end it."""
_ERROR_KEY = "lora_grpo/error"
_NOTHING: Any = object()
"""Fills the shares that are shorter than others."""

_waiting_group: Any = None
"""The gloo process group for waiting, between `join` and the end of `member` in several processes."""


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK") or 0)


def is_main() -> bool:
    """Return whether this is the process that writes files and prints."""
    return rank() == 0


def join() -> None:
    """Connect to the other ranks and select the GPU of this rank. Call it before a model is loaded.

    Raises:
        UserError: the launcher set only a part of the environment, or started more processes than there are GPUs.
    """
    global _waiting_group
    if world_size() == 1 or _waiting_group is not None:
        return
    import torch
    from accelerate import PartialState

    if "RANK" not in os.environ:
        raise UserError(f"WORLD_SIZE is {world_size()} and RANK is not set; use torchrun, or unset WORLD_SIZE")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine
    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise UserError(f"{processes} processes were started and {gpus} GPUs are visible; pass --nproc-per-node {gpus}")
    if not gpus:
        # accelerate 1.15 names the device of a rank `cpu:0`, but torch.load (2.13) cannot load an optimizer to `cpu:0`.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    # Python signal handlers do not run while torch's C++ code connects, so use the default handler. No files exist yet.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The Trainer uses Accelerate's state, which sets the device of this rank and initializes NCCL, or gloo on a CPU.
    PartialState(cpu=not gpus, timeout=_GRADIENT_TIMEOUT)
    # Wait outside a step, such as in an evaluation, with gloo: waiting with NCCL keeps the GPU busy and times out.
    _waiting_group = torch.distributed.new_group(backend="gloo", timeout=_WAIT_TIMEOUT)
    signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def member() -> Iterator[None]:
    """Run a command or a call as one of several ranks: only rank 0 prints, and all ranks disconnect at its end.

    After an error, a rank stays connected, to publish the error or to learn the one that another rank published.
    """
    if world_size() > 1:
        # DDP's reducer warns about a setting in `grpo_arguments` on every rank. torch reads this variable on import.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with contextlib.ExitStack() as stack:
        if not is_main():  # rank 0 prints the same
            null = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
            stack.enter_context(console.listening(lambda message: None))
        yield
    _leave()


def _leave() -> None:
    global _waiting_group
    if _waiting_group is not None:
        from accelerate import PartialState

        barrier()
        _waiting_group = None
        PartialState().destroy_process_group()


def barrier() -> None:
    """Wait until every rank has called this function."""
    if _waiting_group is not None:
        import torch

        # Poll, so that signals are handled immediately. gloo's own wait would delay them.
        work = torch.distributed.barrier(group=_waiting_group, async_op=True)
        pause = _FIRST_POLL_SECONDS
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        work.wait()


def gather(value: T) -> list[T]:
    """Return the values of all ranks on every rank, ordered by rank."""
    if _waiting_group is None:
        return [value]
    import torch

    barrier()
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value, group=_waiting_group)
    return values


def once(function: Callable[[], T]) -> T:
    """Call a function on rank 0 after all ranks have arrived, and return its result on every rank."""
    barrier()
    value = function() if is_main() else None
    return gather(value)[0]  # type: ignore[return-value]


def own_share(items: Sequence[T]) -> list[T]:
    """Return the part of the work that this rank does: rank 0 takes the first item, rank 1 the second, and so on."""
    return list(items[rank() :: world_size()])


def join_shares(results: Sequence[T]) -> list[T]:
    """Return the results of all ranks on every rank, in the order of the items that `own_share` split."""
    turns = itertools.zip_longest(*gather(list(results)), fillvalue=_NOTHING)
    return [result for turn in turns for result in turn if result is not _NOTHING]


def report_error(message: str) -> None:
    """Publish the error of this rank for the ranks that fail because of it, before it is printed.

    Ranks other than 0 also wait. If rank 0 fails with the same error, its launcher ends this rank here.
    """
    if _waiting_group is not None and reported_error() is None:
        with contextlib.suppress(RuntimeError):  # the launcher hosts the store and may be gone
            _store().set(_ERROR_KEY, message)
    if not is_main():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_LAUNCHER_SECONDS)


def reported_error() -> str | None:
    """Return the error published by a failed rank, or None."""
    if _waiting_group is not None:
        with contextlib.suppress(RuntimeError):
            if _store().check([_ERROR_KEY]):
                return str(_store().get(_ERROR_KEY).decode())
    return None


def _store() -> Any:
    """Return the key-value store that the launcher hosts for all ranks."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
