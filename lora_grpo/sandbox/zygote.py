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
import random
import select
import signal
import socket
import struct
import sys

from lora_grpo.sandbox import candidate, examiner, lockdown

PRELOADED = """
bisect cmath collections copy datetime functools heapq itertools math operator random re string typing
"""
"""Loaded before the fork, as programs use them most. More would make each fork dearer: the cost grows with memory."""

ANSWER = struct.Struct("<?i")
"""How a child ended: whether it had to be killed, its wait status."""

_LINK, _REPORT = 3, 4


def main(role: str, control_descriptor: int, isolation: str, readable: list[str], limits: list[int]) -> None:
    """Serve until the other end of the control socket closes.

    Args:
        role: `candidate` or `examiner`.
        control_descriptor: of the control socket.
        isolation: `landlock`, `bubblewrap` (which is around this process already) or `none`.
        readable: what stays readable, as `lockdown.give_up_files` takes it.
        limits: address space of a child in bytes, and its CPU time in seconds.
    """
    # Both are inherited, and a launcher's choice of them would cost this process its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=control_descriptor)
    commands = select.poll()
    commands.register(control, select.POLLIN)
    parent, here = os.getppid(), os.getpid()
    # The first look for a module also has the import system list the library's folder, whose listing is not granted.
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
    lockdown.limit_resources(limits[0])
    filter_ = None
    if isolation != "none":
        lockdown.give_up_privileges()
        if isolation == "landlock":
            lockdown.give_up_files(readable)
        filter_ = lockdown.give_up_system_calls()
    sys.path[:] = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path]
    gc.collect()
    gc.freeze()
    control.sendall(b"!")
    os.dup2(null, 2)  # what was said there was for the parent to read if the start had failed
    os.close(null)
    child = 0
    while True:
        # Descriptors can outlive a killed parent in its other children, so its id is looked at as well.
        while not commands.poll(1000):
            if os.getppid() != parent:
                _end(child)
                os._exit(0)
        command, descriptors = _receive(control)
        if command == b"R":
            child = os.fork()
            if child == 0:
                control.close()
                _serve(role, here, descriptors, limits[1], filter_)
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


def _serve(
    role: str, parent: int, descriptors: list[int], cpu_seconds: int, filter_: lockdown.SystemCallFilter | None
) -> None:
    """Be the child: take the descriptors, shut the door, run the program, end."""
    code = 1
    try:
        lockdown.die_with_parent(parent)
        os.setpgid(0, 0)
        payload = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0)
        # Moved out of the way first: one of them may have the number that another is to get.
        high = [os.dup2(descriptor, 20 + place) for place, descriptor in enumerate(descriptors[1:])]
        for place, descriptor in enumerate(high):
            os.dup2(descriptor, _LINK + place, inheritable=False)
        os.closerange(_LINK + len(high), 64)
        lockdown.limit_cpu(cpu_seconds)
        random.seed(0)  # which forking has undone: a program that draws numbers gets the same verdict each time
        if filter_:
            filter_.put_on()
        if role == "candidate":
            candidate.run(payload, _LINK)
        else:
            os.write(_REPORT, json.dumps(examiner.examine(payload, _LINK)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)
