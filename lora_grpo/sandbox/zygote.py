"""A process that forks one child per program. It runs in its own interpreter.

Commands on the control socket have one byte:

    R  fork a child; sent with descriptors, and the first one contains the program
    K  kill the child if it is still running, and reply with its wait status

The child reads the program after the fork, and the kernel writes its status into a buffer that is sent and then
wiped. This process therefore never contains anything that a program chose, which its later children would inherit.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import select
import selectors
import signal
import socket
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter
from typing import NoReturn

from lora_grpo.sandbox import candidate, examiner, lockdown, system_calls
from lora_grpo.sandbox.adapt import adapt
from lora_grpo.sandbox.importer import Importer
from lora_grpo.sandbox.mappings import merge_mappings

PRELOADED = """
bisect cmath collections copy datetime functools heapq itertools math operator random re string typing
"""
"""Commonly used modules, which are loaded before the fork. Additional modules would make each fork slower."""

STATUS_BYTES = 4
"""Size of a wait status."""

# Descriptors of a child, numbered in the order in which `Worker._fork_child` sends them. The kernel gives them other
# numbers, so they are moved.
_LINK = 3  # the socket to the other child
_REPORT = 4  # only of the tests: where they write the verdict
_ABOVE_ALL = 20  # temporary numbers, which none of the descriptors above has
_END_OF_DESCRIPTORS = 64  # more than `lockdown` allows

_POLL_MILLISECONDS = 1000
_MAX_DESCRIPTORS_RECEIVED = 4

_libc = ctypes.CDLL(None)


def main(role: str, tier: str, control: str, library: str, memory_bytes: str, cpu_seconds: str) -> None:
    """Serve commands until the other end of the control socket closes.

    Args:
        role: `candidate` or `examiner`.
        tier: `landlock`, `bubblewrap`, which is already active, or `none`.
        control: descriptor of the socket for commands.
        library: descriptor of the file that `library.collect` made.
        memory_bytes: limit of a child's address space.
        cpu_seconds: limit of a child's CPU time.
    """
    parent = os.getppid()
    zygote = os.getpid()
    control_socket = socket.socket(fileno=int(control))
    commands = select.poll()
    commands.register(control_socket, select.POLLIN)
    _prepare(tier, Importer(int(library)), int(memory_bytes))
    control_socket.sendall(b"!")
    os.dup2(0, 2)  # stderr sent startup errors to the parent

    child = 0  # process id, or 0 if there is none
    status = ctypes.create_string_buffer(STATUS_BYTES)
    while True:
        # Other children of a killed parent may keep the socket open, so also check the parent's process id.
        while not commands.poll(_POLL_MILLISECONDS):
            if os.getppid() != parent:
                _kill_child(child, status)
                os._exit(0)
        command, descriptors, _, _ = socket.recv_fds(control_socket, 1, _MAX_DESCRIPTORS_RECEIVED)
        if command == b"R":
            child = os.fork()
            if child == 0:
                control_socket.close()
                _run_child(role, tier, zygote, descriptors, int(cpu_seconds))
            for descriptor in descriptors:
                os.close(descriptor)
        elif command == b"K":
            _kill_child(child, status)
            control_socket.sendall(status)
            ctypes.memset(status, 0, STATUS_BYTES)
            child = 0
        else:  # the socket closed
            _kill_child(child, status)
            os._exit(0)


def _prepare(tier: str, importer: Importer, memory_bytes: int) -> None:
    """Load the modules that children need, and drop all other access."""
    # Both settings are inherited. If SIGCHLD were ignored, this process could not reap its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])

    # The last imports from files.
    merge_mappings()
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # the interpreter was built without it
            importlib.import_module(name)
    os.environ.clear()
    adapt(selectors, importer.time_zones)

    lockdown.limit_resources(memory_bytes)
    if tier != "none":
        lockdown.give_up_privileges()
        if tier == "landlock":
            lockdown.give_up_files()
        lockdown.limit_system_calls(system_calls.zygote_filter())

    # From now on, modules come from memory.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, importer]
    sys.path.clear()
    sys.path_importer_cache.clear()
    os.getcwd = lambda: "/"  # functions such as `os.path.abspath` only need some answer

    # Children share the memory of these objects, as long as no collection writes to them.
    gc.collect()
    gc.freeze()


def _kill_child(child: int, status: ctypes.Array[ctypes.c_char]) -> None:
    """Kill the child if it is still running, and let the kernel write its status. `os.waitpid` would read it."""
    if not child:
        return
    # The process id stays reserved until the child is reaped. Without a filter, the child may have children, which are
    # in its process group unless they leave it.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _libc.waitpid(child, status, 0)


def _run_child(role: str, tier: str, zygote: int, descriptors: list[int], cpu_seconds: int) -> NoReturn:
    """Run as the child: set up descriptors, install the filter, run the program, and exit."""
    exit_code = 1
    try:
        lockdown.die_with_parent(zygote)
        os.setpgid(0, 0)

        payload_file, *sockets = descriptors
        payload = os.pread(payload_file, os.lseek(payload_file, 0, os.SEEK_END), 0)

        # Move all sockets out of the way first, because one may have the number that another needs.
        moved = [os.dup2(descriptor, _ABOVE_ALL + index) for index, descriptor in enumerate(sockets)]
        for index, descriptor in enumerate(moved):
            os.dup2(descriptor, _LINK + index, inheritable=False)
        os.closerange(_LINK + len(moved), _END_OF_DESCRIPTORS)

        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        # A program that uses random numbers must always get the same verdict. `random` draws a new seed after a fork.
        random.seed(0)
        if tier != "none":
            lockdown.limit_system_calls(system_calls.child_filter())

        if role == "candidate":
            candidate.run(payload, _LINK)
        else:
            report = examiner.examine(payload, _LINK)
            os.write(_REPORT, json.dumps(report).encode())
        exit_code = 0
    finally:
        os._exit(exit_code)
