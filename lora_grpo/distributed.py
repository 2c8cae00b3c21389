"""Several processes that train one adapter: which of them this is, and how they wait for each other.

A launcher starts the same command once a process (a rank) and says in the environment which is which. Each rank answers
and learns from its share of a step's completions; DDP adds the gradients up, so that all adapters stay equal. Rank 0
alone writes and speaks. One process is the case without a launcher: every function here is then free and does nothing.
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
"""How long a gradient waits for the other ranks' before it is an error; transformers' own default."""
_WAIT_TIMEOUT = timedelta(days=30)
"""How long ranks wait for each other outside a step: for an evaluation, that is."""
_HOLD_SECONDS = 3.0
"""How long an error waits for rank 0 to say the same."""
_ERROR = "lora_grpo/error"


def world_size() -> int:
    """Return the number of ranks.

    Raises:
        UserError: `WORLD_SIZE`, which launchers set, is no number of processes.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    if not launched.isdecimal() or int(launched) < 1:
        raise UserError(f"the environment has WORLD_SIZE={launched!r}; expected a number of processes, or unset it")
    return int(launched)


def rank() -> int:
    """Return which of the ranks this is, from 0.

    Raises:
        UserError: `RANK`, which launchers set, is no number.
    """
    launched = os.environ.get("RANK", "0")
    if not launched.isdecimal():
        raise UserError(f"the environment has RANK={launched!r}; expected a process's number, or unset it")
    return int(launched)


def is_main() -> bool:
    """Return whether this is the rank that writes and speaks."""
    return rank() == 0


def launcher(processes: int) -> list[str]:
    """Return the arguments of Python that start a script as several ranks on this machine."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def join() -> None:
    """Meet the other ranks and take this one's GPU; to be called before a model is loaded, after `torch` was imported.

    Raises:
        UserError: there are fewer GPUs than ranks, or the environment does not say which rank this is.
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
            f"{here} processes were started for {torch.cuda.device_count()} GPUs; start one for each GPU "
            f"(--nproc-per-node, or accelerate's --num_processes)"
        )
    if not on_gpu:
        # accelerate 1.15 calls a rank's device `cpu:0`, to which torch.load (2.13) cannot restore an optimizer.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # Accelerate's state is what the Trainer will look for: it sets this rank's device and opens NCCL, or gloo on a CPU.
    # Ranks meet in torch's own code, where no handler of Python's is called; nothing was written yet.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    PartialState(cpu=not on_gpu, timeout=_STEP_TIMEOUT)
    # Waiting is gloo's on any machine: a rank that waits in NCCL keeps its GPU busy and is killed after a time.
    _group.append(torch.distributed.new_group(backend="gloo", timeout=_WAIT_TIMEOUT))
    signal.signal(signal.SIGTERM, handler)


def leave() -> None:
    """Part from the other ranks, at the end of the command."""
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
        # A signal is seen between two looks; within gloo's own wait it would be seen at its end.
        while not waiting.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        waiting.wait()


def broadcast_from_main(make: Callable[[], T]) -> T:
    """Return on every rank what rank 0 alone has made; what has to be so before it is made is so on all ranks."""
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


def max_over_processes(value: int) -> int:
    """Return the largest of the ranks' values, on every rank."""
    if not _group:
        return value
    import torch

    values = torch.tensor(value)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=_group[0])
    return int(values)


@contextlib.contextmanager
def silence_other_processes() -> Iterator[None]:
    """Drop what other ranks print within the block: rank 0 prints the same."""
    if world_size() > 1:
        # DDP's reducer warns on every rank of what `grpo_arguments` asks it for. Read when torch is imported.
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


def tell(error: str) -> None:
    """Leave word of this rank's error for the ranks that fail or are ended because of it."""
    if _group and told() is None:
        with contextlib.suppress(RuntimeError):  # the launcher, which keeps the store, is gone
            _store().set(_ERROR, error)


def told() -> str | None:
    """Return the error that a rank failed with, if one did."""
    if _group:
        with contextlib.suppress(RuntimeError):
            if _store().check([_ERROR]):
                return str(_store().get(_ERROR).decode())
    return None


def let_main_speak() -> None:
    """Wait, on other ranks, before an error is printed: most are every rank's, and one line is enough.

    Where rank 0 fails too, its launcher ends this rank here.
    """
    if not is_main():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_HOLD_SECONDS)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


_group: list[Any] = []
"""The group in which this process waits for the others, once it has joined them."""
