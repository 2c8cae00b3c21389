"""A process that forks one child per program. It runs in its own interpreter.

Commands on the control socket have one byte:

    R  fork a child; sent with descriptors, and the first one contains the program
    K  kill the child if it is still running, and reply with its wait status

The child reads the program after the fork, and the kernel writes its status into a buffer that is sent and then
wiped. This process therefore never contains anything that a program chose, which its later children would inherit.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import marshal
import mmap
import os
import random
import resource
import select
import selectors
import signal
import socket
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, SourcelessFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from lora_grpo.sandbox import candidate, examiner, lockdown
from lora_grpo.sandbox.adapt import adapt
from lora_grpo.sandbox.mappings import merge_mappings

PRELOADED = """
bisect cmath collections copy datetime functools heapq itertools math operator random re string typing
"""
"""Commonly used modules, which are loaded before the fork. Additional modules would make each fork slower."""

STATUS_BYTES = 4
"""Size of a wait status."""
_LINK, _REPORT = 3, 4
_libc = ctypes.CDLL(None)


class Importer(SourcelessFileLoader):
    """Find and load the modules that `launch.collect` returned. The base class executes the code of `get_code`.

    The shared library of an extension is loaded now, so its module can be created later without its file. The code of
    Python modules and the time zones stay in a file in memory. A private mapping of it costs nothing to fork.
    """

    def __init__(self, library: int) -> None:
        self._content = mmap.mmap(library, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        os.close(library)
        self._start = 8 + int.from_bytes(self._content[:8], "little")
        paths, self._modules, zones = marshal.loads(self._content[8 : self._start])
        self.time_zones = functools.cache(lambda: marshal.loads(self._content[self._start + zones :]))
        self._extensions: dict[str, str] = {}
        for name, path in paths.items():
            with contextlib.suppress(OSError):  # it needs a shared library that this machine lacks
                ctypes.CDLL(path)
                self._extensions[name] = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module in the library."""
        if name in self._extensions:
            return spec_from_file_location(name, self._extensions[name])
        if name not in self._modules:
            return None
        origin, is_package, *_ = self._modules[name]
        spec = ModuleSpec(name, self, origin=origin, is_package=is_package)
        spec.has_location = True  # sets `__file__`
        return spec

    def get_code(self, name: str) -> Any:
        """Return the code object of a module."""
        origin, _, is_source, start, end = self._modules[name]
        content = self._content[self._start + start : self._start + end]
        return compile(content, origin, "exec", dont_inherit=True) if is_source else marshal.loads(content)

    def exec_module(self, module: ModuleType) -> None:
        """Execute a module, and adapt it if it needs more than a sandboxed process has."""
        super().exec_module(module)
        adapt(module, self.time_zones)


def main(role: str, isolation: str, *numbers: str) -> None:
    """Serve commands until the other end of the control socket closes.

    Args:
        role: `candidate` or `examiner`.
        isolation: `landlock`, `bubblewrap`, which is already active, or `none`.
        numbers: the descriptors of the socket for commands and of the library, and a child's limits of address space
            in bytes and of CPU time in seconds.
    """
    control_descriptor, library, memory_bytes, cpu_seconds = map(int, numbers)
    parent, here = os.getppid(), os.getpid()
    control = socket.socket(fileno=control_descriptor)
    commands = select.poll()
    commands.register(control, select.POLLIN)
    _prepare(isolation, Importer(library), memory_bytes)
    control.sendall(b"!")
    os.dup2(0, 2)  # stderr sent startup errors to the parent
    child, answer = 0, ctypes.create_string_buffer(STATUS_BYTES)
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
                _serve(role, isolation, here, descriptors, cpu_seconds)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        _end(child, answer)
        if command != b"K":
            os._exit(0)
        control.sendall(answer)
        ctypes.memset(answer, 0, STATUS_BYTES)
        child = 0


def _prepare(isolation: str, importer: Importer, memory_bytes: int) -> None:
    """Load the modules that children need, and drop all other access."""
    # Both are inherited. With other settings, this process could not reap its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    merge_mappings()
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # the interpreter was built without it
            importlib.import_module(name)
    os.environ.clear()
    adapt(selectors, importer.time_zones)
    lockdown.limit_resources(memory_bytes)
    if isolation != "none":
        lockdown.give_up_privileges()
        if isolation == "landlock":
            lockdown.give_up_files()
        lockdown.limit_system_calls(lockdown.permissions())
    # From now on, modules come from memory.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, importer]
    sys.path.clear()
    sys.path_importer_cache.clear()
    os.getcwd = lambda: "/"  # functions such as `os.path.abspath` only need some answer
    gc.collect()
    gc.freeze()  # children share the memory of these objects


def _end(child: int, answer: ctypes.Array[ctypes.c_char]) -> None:
    """Kill the child if it is still running, and let the kernel write its status. `os.waitpid` would read it."""
    if not child:
        return
    # The process id stays reserved until the child is reaped. Without a filter, the child may have children, which are
    # in its process group unless they leave it.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _libc.waitpid(child, answer, 0)


def _serve(role: str, isolation: str, parent: int, descriptors: list[int], cpu_seconds: int) -> None:
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
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        # A program that uses random numbers must always get the same verdict. `random` draws a new seed after a fork.
        random.seed(0)
        if isolation != "none":
            lockdown.limit_system_calls(lockdown.denials())
        if role == "candidate":
            candidate.run(payload, _LINK)
        else:
            os.write(_REPORT, json.dumps(examiner.examine(payload, _LINK)).encode())
        code = 0
    finally:
        os._exit(code)
