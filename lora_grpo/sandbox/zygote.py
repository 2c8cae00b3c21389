"""A process that forks one child per program. It runs in its own interpreter.

Commands on the control socket have one byte:

    R  fork a child; sent with descriptors, and the first one contains the program
    K  kill the child if it is still running, and reply with how it ended (see `how_it_ended`)

The child reads the program after the fork, and the kernel writes how it ended into a buffer that is sent and then
wiped. This process therefore never contains anything that a program chose, which its later children would inherit.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import marshal
import mmap
import os
import random
import select
import signal
import socket
import struct
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from lora_grpo.sandbox import candidate, examiner, lockdown

PRELOADED = """
bisect cmath collections copy datetime functools heapq itertools math operator random re string typing
"""
"""Commonly used modules, which are loaded before the fork. Additional modules would make each fork slower."""


class Importer:
    """Import the standard library from memory.

    An extension's file is loaded now. Its module is created when it is imported, without access to the file. The code
    of Python modules is in a file in memory. A private mapping of it costs nothing to fork.
    """

    def __init__(self, extensions: dict[str, str], modules: dict[str, Any], contents: int) -> None:
        self._extensions = {name: path for name, path in extensions.items() if _load(path)}
        self._modules = modules
        self._contents = mmap.mmap(contents, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        os.close(contents)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module in the library."""
        if name in self._extensions:
            return spec_from_file_location(name, self._extensions[name])
        if name not in self._modules:
            return None
        origin, is_package, *_ = self._modules[name]
        spec = ModuleSpec(name, self, origin=origin, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True  # sets `__file__`
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Use an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of a module."""
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> Any:
        """Return the code object of a module."""
        origin, _, is_source, start, end = self._modules[name]
        content = self._contents[start:end]
        return compile(content, origin, "exec", dont_inherit=True) if is_source else marshal.loads(content)

    def get_source(self, name: str) -> None:
        """Return None: tracebacks have no source lines of the standard library."""


def _load(path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:  # needs a shared library that this machine lacks
        return False
    return True


ANSWER_BYTES = 256
"""Two `siginfo_t`: from before and from after the child was killed."""
_CODE, _PID, _STATUS = (8, 16, 24) if sys.platform == "linux" else (8, 12, 20)
_CLD_EXITED = 1
_PT_LOAD, _PT_GNU_RELRO, _PF_W = 1, 0x6474E552, 2

_LINK, _REPORT = 3, 4
_wait = ctypes.CDLL(None).waitid


def how_it_ended(answer: bytes) -> tuple[bool, int]:
    """Return whether a child had to be killed, and its wait status."""
    before, after = answer[: ANSWER_BYTES // 2], answer[ANSWER_BYTES // 2 :]
    (pid,) = struct.unpack_from("i", before, _PID)
    (code,), (status,) = (struct.unpack_from("i", after, offset) for offset in (_CODE, _STATUS))
    return pid == 0, status << 8 if code == _CLD_EXITED else status


def main(role: str, control_descriptor: int, isolation: str, library: tuple[Any, Any, int], limits: list[int]) -> None:
    """Serve commands until the other end of the control socket closes.

    The role is `candidate` or `examiner`. The isolation is `landlock`, `bubblewrap`, which is already active, or
    `none`. The library holds the arguments of `Importer`. The limits are a child's address space in bytes and CPU time
    in seconds.
    """
    # Both are inherited. With other settings, this process could not reap its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    control = socket.socket(fileno=control_descriptor)
    commands = select.poll()
    commands.register(control, select.POLLIN)
    parent, here = os.getppid(), os.getpid()
    importer = Importer(*library)
    if sys.platform == "linux":
        _merge_mappings()
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):  # the interpreter was built without it
            importlib.import_module(name)
    os.environ.clear()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    lockdown.limit_resources(limits[0])
    filter_ = None
    if isolation != "none":
        lockdown.give_up_privileges()
        if isolation == "landlock":
            lockdown.give_up_files()
        filter_ = lockdown.give_up_system_calls()
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, importer]
    sys.path.clear()
    sys.path_importer_cache.clear()
    os.getcwd = lambda: "/"  # functions such as `os.path.abspath` only need some answer
    gc.collect()
    gc.freeze()
    control.sendall(b"!")
    os.dup2(null, 2)  # stderr sent startup errors to the parent
    os.close(null)
    child, answer = 0, ctypes.create_string_buffer(ANSWER_BYTES)
    while True:
        # Other children of a killed parent may keep the socket open, so also check the parent's process id.
        while not commands.poll(1000):
            if os.getppid() != parent:
                _end(child, answer)
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
            _end(child, answer)
            control.sendall(answer)
            ctypes.memset(answer, 0, ANSWER_BYTES)
            child = 0
        else:
            _end(child, answer)
            os._exit(0)


class _Library(ctypes.Structure):
    """`struct dl_phdr_info` of link.h."""

    _fields_ = (
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_size_t),
        ("n", ctypes.c_ushort),
    )


def _merge_mappings() -> None:
    """Give the segments of each shared library equal rights, so that the kernel merges five mappings into two.

    The time of a fork depends on the number of mappings. The rights protect nothing here, because a candidate may map
    executable memory.
    """
    libc = ctypes.CDLL(None)

    def merge(library: Any, size: int, data: Any) -> int:
        at = library.contents
        for header in range(at.headers, at.headers + 56 * at.n, 56):
            # struct Elf64_Phdr: type, flags, offset, address, physical address, size in the file, size
            kind, flags, _, address, _, _, length = struct.unpack("2I5Q", ctypes.string_at(header, 48))
            start, end = (at.base + address) & -mmap.PAGESIZE, -(-(at.base + address + length) // mmap.PAGESIZE)
            rights = mmap.PROT_READ | (mmap.PROT_EXEC if kind == _PT_LOAD else mmap.PROT_WRITE)
            if kind == _PT_GNU_RELRO or (kind == _PT_LOAD and not flags & _PF_W):
                libc.mprotect(ctypes.c_size_t(start), ctypes.c_size_t(end * mmap.PAGESIZE - start), rights)
        return 0

    visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    libc.dl_iterate_phdr(visit(merge), None)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    size = 4 * array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(size))
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _end(child: int, answer: ctypes.Array[ctypes.c_char]) -> None:
    """Kill the child if it is still running, and let the kernel write how it ended. Not `os.waitid`, which reads it."""
    if not child:
        return
    _wait(os.P_PID, child, answer, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    # The process id stays reserved until the child is reaped. Without a filter, the child may have children, which are
    # in its process group unless they leave it.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _wait(os.P_PID, child, ctypes.byref(answer, ANSWER_BYTES // 2), os.WEXITED)


def _serve(
    role: str, parent: int, descriptors: list[int], cpu_seconds: int, filter_: lockdown.SystemCallFilter | None
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
        if filter_:
            filter_.put_on()
        if role == "candidate":
            candidate.run(payload, _LINK)
        else:
            os.write(_REPORT, json.dumps(examiner.examine(payload, _LINK)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)
