"""A process that stays clean and forks one child for each program; runs in an interpreter of its own.

Commands come in on the control socket, one byte each:

    R  with descriptors: fork a child for the program in the first of them
    K  kill the child if it is still there, and answer with how it ended

The program is read by the child, after the fork: this process never holds a line of it.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable

from lora_grpo.sandbox import candidate, examiner, lockdown

# Loaded before the fork, so that programs need not load them; those with libraries of their own must be.
PRELOADED = """
abc array ast base64 bisect bz2 calendar cmath collections collections.abc contextlib copy csv ctypes dataclasses
datetime decimal difflib enum fractions functools hashlib heapq hmac inspect io itertools json keyword locale lzma math
numbers operator os pprint queue random re reprlib secrets statistics string struct sys textwrap threading time timeit
traceback types typing unicodedata uuid weakref zlib
"""

ANSWER = struct.Struct("<?i")
"""How a child ended: whether it had to be killed, its wait status."""

_LINK, _REPORT = 3, 4


def main(role: str, control_descriptor: int, isolation: str) -> None:
    """Serve until the other end of the control socket closes.

    Args:
        role: `candidate` or `examiner`.
        control_descriptor: of the control socket.
        isolation: `landlock`, `bubblewrap` (which is around this process already) or `none`.
    """
    control = socket.socket(fileno=control_descriptor)
    parent, here = os.getppid(), os.getpid()
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # an interpreter built without it
            importlib.import_module(name)
    # Child processes are the first to go when memory runs out, not the training run.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    os.environ.clear()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    put_on_filter: Callable[[], None] = lambda: None  # noqa: E731
    if isolation != "none":
        lockdown.give_up_privileges()
        put_on_filter = lockdown.SystemCallFilter().put_on
    if isolation == "landlock":
        lockdown.give_up_files(lockdown.standard_library())
    sys.path[:] = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path]
    gc.collect()
    gc.freeze()
    control.sendall(b"!")
    # From here on nothing is said on the standard error, whose other end is closed.
    os.dup2(null, 2)
    os.close(null)
    child = 0
    while True:
        # Descriptors can outlive a killed parent in its other children, so its id is looked at as well.
        while not select.select([control], [], [], 1.0)[0]:
            if os.getppid() != parent:
                _end(child)
                os._exit(0)
        command, descriptors = _receive(control)
        if command == b"R":
            child = os.fork()
            if child == 0:
                _serve(role, parent=here, control=control, descriptors=descriptors, filter_=put_on_filter)
            for descriptor in descriptors:
                os.close(descriptor)
        elif command == b"K":
            control.sendall(ANSWER.pack(*_end(child)))
            child = 0
        else:
            _end(child)
            os._exit(0)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    size = 4 * array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(size))
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _end(child: int) -> tuple[bool, int]:
    """Kill the child, unless it has ended, and return `ANSWER`'s fields."""
    if not child:
        return False, 0
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    # Until it is reaped, its number cannot be another's. Without a filter it may have children of its own; they are in
    # its process group, unless they hide.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    return not ended, os.waitpid(child, 0)[1]


def _serve(role: str, parent: int, control: socket.socket, descriptors: list[int], filter_: Callable[[], None]) -> None:
    """Be the child: take the descriptors, shut the door, run the program, end."""
    code = 1
    try:
        lockdown.die_with_parent(parent)
        os.setpgid(0, 0)
        control.close()
        request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        # Moved out of the way first: one of them may have the number that another is to get.
        moved = [os.dup(descriptor) for descriptor in descriptors[1:]]
        high = [os.dup2(descriptor, 20 + place) for place, descriptor in enumerate(moved)]
        for place, descriptor in enumerate(high):
            os.dup2(descriptor, _LINK + place, inheritable=False)
        os.closerange(_LINK + len(high), 4096)
        lockdown.limit_resources(request["memory_bytes"], request["cpu_seconds"])
        filter_()
        if role == "candidate":
            candidate.run(request["source"], _LINK)
        else:
            report = examiner.examine(request, _LINK)
            os.write(_REPORT, json.dumps(report).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)
