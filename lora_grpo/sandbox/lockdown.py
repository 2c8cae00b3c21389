"""Permanently drop access to files, system calls, capabilities, and resources in a sandboxed process.

No privileges are required. Landlock blocks access to the file system. seccomp allows only the system calls of
system_calls.py. Resource limits bound memory, CPU time, and descriptors. On old kernels, the functions raise OSError
before they change anything.

A zygote calls all of them while it starts. Its children inherit everything, and add the second filter.

Source: linux/landlock.h, linux/capability.h, linux/prctl.h, linux/filter.h, prctl(2), seccomp(2), setrlimit(2).
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import NamedTuple

from lora_grpo.sandbox.system_calls import ARCHITECTURES

# prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_GET_SECCOMP = 21
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

# System calls that libc has no function for. Landlock's have the same number on all architectures.
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_CAPSET = {"x86_64": 126, "aarch64": 91}

_LANDLOCK_CREATE_RULESET_VERSION = 1  # the flag that asks for the version
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

_MOST_DESCRIPTORS = 32
_STACK_BYTES = 64 << 20
_BPF_INSTRUCTION_BYTES = 8


class LandlockRight(NamedTuple):
    """An access that Landlock denies to the process once it is handled, because no rule grants it."""

    name: str
    bit: int
    """Its position in the field of struct landlock_ruleset_attr."""
    since: int
    """The first version of Landlock that knows it. Earlier ones refuse a ruleset with it."""


FILE_RIGHTS = (
    LandlockRight("EXECUTE", 0, since=1),
    LandlockRight("WRITE_FILE", 1, since=1),
    LandlockRight("READ_FILE", 2, since=1),
    LandlockRight("READ_DIR", 3, since=1),
    LandlockRight("REMOVE_DIR", 4, since=1),
    LandlockRight("REMOVE_FILE", 5, since=1),
    LandlockRight("MAKE_CHAR", 6, since=1),
    LandlockRight("MAKE_DIR", 7, since=1),
    LandlockRight("MAKE_REG", 8, since=1),
    LandlockRight("MAKE_SOCK", 9, since=1),
    LandlockRight("MAKE_FIFO", 10, since=1),
    LandlockRight("MAKE_BLOCK", 11, since=1),
    LandlockRight("MAKE_SYM", 12, since=1),
    LandlockRight("REFER", 13, since=2),  # link or rename into another folder
    LandlockRight("TRUNCATE", 14, since=3),
    LandlockRight("IOCTL_DEV", 15, since=5),
)
NETWORK_RIGHTS = (
    LandlockRight("BIND_TCP", 0, since=4),
    LandlockRight("CONNECT_TCP", 1, since=4),
)
SCOPES = (
    LandlockRight("ABSTRACT_UNIX_SOCKET", 0, since=6),  # connect to one of a process outside
    LandlockRight("SIGNAL", 1, since=6),  # send one to a process outside
)

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the ABI version of Landlock in a Linux kernel, or 0 if Landlock is not available."""
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, version)


def has_seccomp() -> bool:
    """Return whether the kernel supports seccomp and the tables have the numbers for this architecture."""
    if sys.platform != "linux" or os.uname().machine not in ARCHITECTURES:
        return False
    return _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def give_up_privileges() -> None:
    """Permanently drop all capabilities, and disallow core dumps and tracing by processes of the same user."""
    # No program that this process starts gets new privileges, not even one with the setuid bit. For a user who is not
    # root, Landlock and seccomp require this flag.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)

    # struct __user_cap_header_struct: version, and process id (0 is the calling process).
    header = struct.pack("<Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    # Two of struct __user_cap_data_struct, for 64 bits: the effective, permitted, and inheritable set.
    no_capabilities = struct.pack("<6I", 0, 0, 0, 0, 0, 0)
    _check(_libc.syscall(_CAPSET[os.uname().machine], header, no_capabilities), "capset")


def give_up_files() -> None:
    """Drop access to the file system. Newer kernels also block TCP and signals to other processes."""
    version = landlock_version()

    # struct landlock_ruleset_attr has grown: an older kernel takes a shorter one.
    fields = [_handled(FILE_RIGHTS, version)]
    if version >= 4:
        fields.append(_handled(NETWORK_RIGHTS, version))
    if version >= 6:
        fields.append(_handled(SCOPES, version))
    attributes = struct.pack(f"<{len(fields)}Q", *fields)

    # A ruleset without rules: what it handles is denied everywhere.
    size = ctypes.c_size_t(len(attributes))
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset")
    _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _handled(rights: tuple[LandlockRight, ...], version: int) -> int:
    """Return the bits of all rights that a version of Landlock knows."""
    bits = 0
    for right in rights:
        if right.since <= version:
            bits |= 1 << right.bit
    return bits


def limit_system_calls(program: bytes) -> None:
    """Install a seccomp filter in addition to earlier ones.

    The long filter of a zygote takes most of a millisecond to install, so only the zygote installs it. Its children add
    the short one.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, padding, address of the instructions.
    header = struct.pack("<H6xQ", len(program) // _BPF_INSTRUCTION_BYTES, ctypes.addressof(instructions))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


def limit_resources(memory_bytes: int) -> None:
    """Limit address space, descriptors, and stack, also for children. Disallow file growth and core dumps."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,  # no file grows, not even one that is open
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MOST_DESCRIPTORS,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,  # locked memory cannot be swapped
    }
    for name, limit in limits.items():
        _, hard_limit = resource.getrlimit(name)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(name, (limit, limit))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits, and exit now if it already has another parent."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int, pointer: ctypes.c_char_p | int = 0) -> None:
    _check(_libc.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def _check(result: int, call: str) -> int:
    """Return the result of a call of libc, or raise OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
