"""A process that forks one child per program. It runs in its own interpreter.

Commands on the control socket have one byte:

    R  fork a child; sent with descriptors, and the first one contains the program
    K  kill the child if it is still running, and reply with how it ended (see `wait_status`)

The child reads the program after the fork, and the kernel writes how it ended into a buffer that is sent and then
wiped. This process therefore never contains anything that a program chose, which its later children would inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import select
import signal
import socket
import struct
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter
from typing import Any

from lora_grpo.sandbox import candidate, examiner, lockdown
from lora_grpo.sandbox.importer import Importer, merge_mappings

PRELOADED = """
bisect cmath collections copy datetime functools heapq itertools math operator random re string typing
"""
"""Commonly used modules, which are loaded before the fork. Additional modules would make each fork slower."""

ANSWER_BYTES = 128
"""Size of `siginfo_t`."""
_CODE, _STATUS = 8, 24
_CLD_EXITED = 1

_LINK, _REPORT = 3, 4
_wait = ctypes.CDLL(None).waitid


def wait_status(answer: bytes) -> int:
    """Return the wait status in the reply to `K`."""
    (code,), (status,) = (struct.unpack_from("i", answer, offset) for offset in (_CODE, _STATUS))
    return status << 8 if code == _CLD_EXITED else status


def main(role: str, control_descriptor: int, isolation: str, library: tuple[Any, Any, int], limits: list[int]) -> None:
    """Serve commands until the other end of the control socket closes.

    Args:
        role: `candidate` or `examiner`.
        control_descriptor: the socket for commands.
        isolation: `landlock`, `bubblewrap`, which is already active, or `none`.
        library: the arguments of `Importer`.
        limits: a child's address space in bytes, and its CPU time in seconds.
    """
    parent, here = os.getppid(), os.getpid()
    control = socket.socket(fileno=control_descriptor)
    commands = select.poll()
    commands.register(control, select.POLLIN)
    system_calls = _prepare(isolation, Importer(*library), limits[0])
    control.sendall(b"!")
    os.dup2(0, 2)  # stderr sent startup errors to the parent
    child, answer = 0, ctypes.create_string_buffer(ANSWER_BYTES)
    while True:
        # Other children of a killed parent may keep the socket open, so also check the parent's process id.
        while not commands.poll(1000):
            if os.getppid() != parent:
                _end(child, answer)
                os._exit(0)
        command, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if command == b"R":
            child = os.fork()
            if child == 0:
                control.close()
                _serve(role, here, descriptors, limits[1], system_calls)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        _end(child, answer)
        if command != b"K":
            os._exit(0)
        control.sendall(answer)
        ctypes.memset(answer, 0, ANSWER_BYTES)
        child = 0


def _prepare(isolation: str, importer: Importer, memory_bytes: int) -> lockdown.SystemCallFilter | None:
    """Load what children need, and give up everything else. Return the filter that children add."""
    # Both are inherited. With other settings, this process could not reap its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError), io.FileIO("/proc/self/maps") as maps:  # bubblewrap has no /proc
        merge_mappings(maps.read().decode())
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # the interpreter was built without it
            importlib.import_module(name)
    os.environ.clear()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    lockdown.limit_resources(memory_bytes)
    system_calls = None
    if isolation != "none":
        lockdown.give_up_privileges()
        if isolation == "landlock":
            lockdown.give_up_files()
        system_calls = lockdown.give_up_system_calls()
    # From now on, modules come from memory.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, importer]
    sys.path.clear()
    sys.path_importer_cache.clear()
    os.getcwd = lambda: "/"  # functions such as `os.path.abspath` only need some answer
    gc.collect()
    gc.freeze()  # children share the memory of these objects
    return system_calls


def _end(child: int, answer: ctypes.Array[ctypes.c_char]) -> None:
    """Kill the child if it is still running, and let the kernel write how it ended. Not `os.waitid`, which reads it."""
    if not child:
        return
    # The process id stays reserved until the child is reaped. Without a filter, the child may have children, which are
    # in its process group unless they leave it.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _wait(os.P_PID, child, answer, os.WEXITED)


def _serve(
    role: str, parent: int, descriptors: list[int], cpu_seconds: int, system_calls: lockdown.SystemCallFilter | None
) -> None:
    """Run as the child: set up descriptors, install the filter, run the program, and exit."""
    code = 1
    try:
        lockdown.die_with_parent(parent)
        os.setpgid(0, 0)
        payload = os.pread(descriptors[0], os.lseek(descriptors[0], 0, os.SEEK_END), 0)
        # Move all descriptors first, because one may have the number that another needs.
        high = [os.dup2(descriptor, 20 + index) for index, descriptor in enumerate(descriptors[1:])]
        for index, descriptor in enumerate(high):
            os.dup2(descriptor, _LINK + index, inheritable=False)
        os.closerange(_LINK + len(high), 64)
        lockdown.limit_cpu(cpu_seconds)
        # A program that uses random numbers must always get the same verdict. `random` draws a new seed after a fork.
        random.seed(0)
        if system_calls:
            system_calls.put_on()
        if role == "candidate":
            candidate.run(payload, _LINK)
        else:
            os.write(_REPORT, json.dumps(examiner.examine(payload, _LINK)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)
