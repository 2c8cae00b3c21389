"""Permanently drop access to files, system calls, capabilities, and resources in a sandboxed process.

No privileges are required. Landlock blocks access to the file system. seccomp allows only the system calls listed in
`syscalls`. Resource limits bound memory, CPU time, and descriptors. On old kernels, the functions raise OSError before
they change anything.

Source: linux/landlock.h, linux/capability.h, prctl(2), seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

from lora_grpo.sandbox.syscalls import ARCHITECTURES, denials, permissions

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT, _LANDLOCK_VERSION = 444, 446, 1
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_DESCRIPTORS, _STACK_BYTES = 32, 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, or 0 if Landlock is not available."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION))


def has_seccomp() -> bool:
    """Return whether the kernel supports seccomp and `syscalls` has the numbers for this architecture."""
    if sys.platform != "linux" or os.uname().machine not in ARCHITECTURES:
        return False
    return _libc.prctl(21, 0, 0, 0, 0) >= 0  # PR_GET_SECCOMP


def give_up_privileges() -> None:
    """Permanently drop all capabilities, and disallow core dumps and tracing by processes of the same user."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    nothing = struct.pack("<6I", *[0] * 6)
    _check(_libc.syscall(_CAPSET[os.uname().machine], header, nothing), "capset")


def give_up_files() -> None:
    """Give up the file system. Newer kernels also block TCP and signals to other processes."""
    version = landlock_version()
    if not version:
        raise OSError("the kernel has no Landlock")
    # All rights that the version supports. Rights that are handled but not granted are denied.
    files = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        files |= (1 << bit) if version >= since else 0
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("<QQQ", files, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _check(
        _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset"
    )
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


class SystemCallFilter:
    """A seccomp filter of BPF instructions that is built once and installed in many processes."""

    def __init__(self, program: bytes) -> None:
        self._lines = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: number of instructions, padding, address of the instructions.
        self._header = struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(self._lines))

    def put_on(self) -> None:
        """Install the filter in addition to earlier filters."""
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(self._header))


def give_up_system_calls() -> SystemCallFilter:
    """Restrict system calls to those listed in `syscalls`, and return the additional filter for children.

    The long allow list takes most of a millisecond to install, so the zygote installs it once. The returned filter
    denies the few calls that only a zygote needs. It is installed in each child.
    """
    machine = os.uname().machine  # one of ARCHITECTURES; see `has_seccomp`
    rest = SystemCallFilter(denials(machine))
    SystemCallFilter(permissions(machine)).put_on()
    return rest


def limit_resources(memory_bytes: int) -> None:
    """Limit address space, descriptors, and stack, also for children. Disallow file growth and core dumps."""
    for name, most in (
        ("RLIMIT_AS", memory_bytes),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", _DESCRIPTORS),
        ("RLIMIT_STACK", _STACK_BYTES),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_MEMLOCK", 0),
    ):
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def limit_cpu(seconds: int) -> None:
    """Limit this process's CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits, and exit now if it already has another parent."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int, pointer: ctypes.c_char_p | int = 0) -> None:
    _check(_libc.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
