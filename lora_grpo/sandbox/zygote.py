"""A process that forks one child per program. It runs in its own interpreter.

Commands on the control socket have one byte:

    R  fork a child; sent with descriptors, and the first one contains the program
    K  kill the child if it is still running, and reply with its exit status

The child reads the program after the fork, so this process never contains any part of it.
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
"""Commonly used modules, which are loaded before the fork. Additional modules would make each fork slower."""

ANSWER = struct.Struct("<?i")
"""The exit status of a child: whether it was still running, and its wait status."""

_LINK, _REPORT = 3, 4


def main(role: str, control_descriptor: int, isolation: str, readable: list[str], limits: list[int]) -> None:
    """Serve commands until the other end of the control socket closes.

    The role is `candidate` or `examiner`. The isolation is `landlock`, which leaves the `readable` paths, `bubblewrap`,
    which is already active, or `none`. The limits are a child's address space in bytes and CPU time in seconds.
    """
    # Both are inherited. With other settings, this process could not reap its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=control_descriptor)
    commands = select.poll()
    commands.register(control, select.POLLIN)
    parent, here = os.getppid(), os.getpid()
    # Importing also caches the directory listing of the standard library, which is unreadable later.
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # the interpreter was built without it
            importlib.import_module(name)
    # If memory runs out, the kernel kills these processes first, not the training run.
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
    os.dup2(null, 2)  # stderr sent startup errors to the parent
    os.close(null)
    child = 0
    while True:
        # Other children of a killed parent may keep the socket open, so also check the parent's process id.
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
    """Kill the child if it is still running, and return the fields of `ANSWER`."""
    if not child:
        return False, 0
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    # The process id stays reserved until the child is reaped. Without a filter, the child may have children, which are
    # in its process group unless they leave it.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    return not ended, os.waitpid(child, 0)[1]


def _serve(
    role: str, parent: int, descriptors: list[int], cpu_seconds: int, filter_: lockdown.SystemCallFilter | None
) -> None:
    """Run as the child: set up descriptors, install the filter, run the program, and exit."""
    code = 1
    try:
        lockdown.die_with_parent(parent)
        os.setpgid(0, 0)
        payload = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0)
        # Move all descriptors first, because one may have the number that another needs.
        high = [os.dup2(descriptor, 20 + index) for index, descriptor in enumerate(descriptors[1:])]
        for index, descriptor in enumerate(high):
            os.dup2(descriptor, _LINK + index, inheritable=False)
        os.closerange(_LINK + len(high), 64)
        lockdown.limit_cpu(cpu_seconds)
        random.seed(0)  # a program that uses random numbers must always get the same verdict
        if filter_:
            filter_.put_on()
        if role == "candidate":
            candidate.run(payload, _LINK)
        else:
            os.write(_REPORT, json.dumps(examiner.examine(payload, _LINK)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)
