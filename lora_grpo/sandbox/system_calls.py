"""The system calls that a sandboxed process may make, as tables, and as the seccomp filters that enforce them.

The tables allow what computation needs. Any other call fails with EPERM, which Python reports as PermissionError: a new
process, a socket, access to other processes or to facilities of the kernel.

Threads are not allowed, although they would stay in the process. Each takes the next number of the machine's process
ids, and so sets the id of the program that follows: `thread_ids` in tests/sandbox/attacks/pairs.py passes a bit that
way. A filter cannot count them either, and RLIMIT_NPROC does not limit root. Event loops need no call beyond those
listed, because a loop without threads is woken only by its own clock; see adapt.py.

There is no file system. Opening a file fails with EPERM, as any access that the sandbox forbids. Looking up a path
fails with ENOENT, because `Path.exists` and parts of the standard library expect that error and no other.

A zygote must also fork, kill, and communicate with its parent. A second filter denies these calls to its children.

Source: linux/seccomp.h, linux/filter.h, linux/audit.h, seccomp(2); numbers from asm/unistd_64.h and
asm-generic/unistd.h; values of arguments from linux/fcntl.h, asm-generic/ioctls.h, linux/time.h, linux/futex.h, and
asm-generic/mman-common.h.
"""

import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH constant of each architecture, in the order of the numbers in the tables."""

Numbers = tuple[int | None, int | None]
"""The number of a system call on each of `ARCHITECTURES`, or None where the call does not exist."""

ALLOWED: dict[str, Numbers] = {
    # Data of descriptors that are already open: sockets to the other processes, and /dev/null. None opens a file.
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    # The process's own memory. For mmap, see the last rule below.
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    # Handlers of its own signals. Not kill, tgkill, or rt_sigqueueinfo, which send signals.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # Waiting, for its own descriptors and clocks. Not epoll_create, because an epoll is an object of the kernel.
    "select": (23, None),
    "poll": (7, None),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "sched_yield": (24, 124),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "pause": (34, None),
    # The time. Not settimeofday.
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    # Facts about the process itself.
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "uname": (63, 160),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    # Random bytes, and the end.
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

ZYGOTE_ONLY: dict[str, Numbers] = {
    # Start, signal, and reap a child.
    "clone": (56, 220),
    "kill": (62, 129),
    # Reply to the parent, and receive descriptors from it.
    "sendto": (44, 206),
    "recvmsg": (47, 212),
    "wait4": (61, 260),
    # What a child does before it installs its own filter, and what libc does when a process starts.
    "prctl": (157, 167),
    "setpgid": (109, 154),
    "close_range": (436, 436),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
}

PATH_LOOKUPS: dict[str, Numbers] = {
    "getcwd": (79, 17),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
}
"""Calls that fail with ENOENT."""


class ArgumentRule(NamedTuple):
    """A system call that is allowed only with certain values of one argument."""

    name: str
    numbers: Numbers
    argument: int
    """Position of the argument, from 0."""
    allowed: dict[str, int]
    """Values by name. Only 32 bits are compared; the kernel reads no more of commands, clock ids, or process ids."""


_OWN_PROCESS = {"the calling process": 0}
_CLOCKS = {
    "CLOCK_REALTIME": 0,
    "CLOCK_MONOTONIC": 1,
    "CLOCK_PROCESS_CPUTIME_ID": 2,
    "CLOCK_THREAD_CPUTIME_ID": 3,
    "CLOCK_MONOTONIC_RAW": 4,
    "CLOCK_REALTIME_COARSE": 5,
    "CLOCK_MONOTONIC_COARSE": 6,
    "CLOCK_BOOTTIME": 7,
    "CLOCK_REALTIME_ALARM": 8,
    "CLOCK_BOOTTIME_ALARM": 9,
    "CLOCK_SGI_CYCLE": 10,
    "CLOCK_TAI": 11,
}
"""Not the CPU time clocks of other processes, whose ids are negative."""

ARGUMENT_RULES = (
    # Not F_SETOWN or F_SETSIG, which can signal other processes.
    ArgumentRule(
        "fcntl",
        (72, 25),
        argument=1,
        allowed={"F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_DUPFD_CLOEXEC": 1030},
    ),
    # TCGETS is isatty. Not FIOASYNC or FIOSETOWN, which can signal other processes.
    ArgumentRule(
        "ioctl",
        (16, 29),
        argument=1,
        allowed={"TCGETS": 0x5401, "FIONREAD": 0x541B, "FIOCLEX": 0x5451, "FIONCLEX": 0x5450},
    ),
    # A process may set its own limits. It cannot raise its hard limits.
    ArgumentRule("prlimit64", (302, 261), argument=0, allowed=_OWN_PROCESS),
    ArgumentRule("sched_getaffinity", (204, 123), argument=0, allowed=_OWN_PROCESS),
    ArgumentRule("clock_gettime", (228, 113), argument=0, allowed=_CLOCKS),
    ArgumentRule("clock_getres", (229, 114), argument=0, allowed=_CLOCKS),
    ArgumentRule("clock_nanosleep", (230, 115), argument=0, allowed=_CLOCKS),
    # All private. Two processes can meet at a futex in a page that both map, such as one of libc, and a futex with
    # priority inheritance names its owner by process id.
    ArgumentRule(
        "futex",
        (202, 98),
        argument=1,
        allowed={
            "FUTEX_WAIT_PRIVATE": 128,
            "FUTEX_WAKE_PRIVATE": 129,
            "FUTEX_WAIT_BITSET_PRIVATE": 137,
            "FUTEX_WAIT_BITSET_PRIVATE | FUTEX_CLOCK_REALTIME": 393,
        },
    ),
    # Other advice changes the page cache, which all processes share.
    ArgumentRule("madvise", (28, 233), argument=2, allowed={"MADV_DONTNEED": 4, "MADV_FREE": 8}),
)

# mmap is allowed without one flag. Huge pages come from a pool that all processes share.
_MMAP: Numbers = (9, 222)
_MMAP_FLAGS_ARGUMENT = 3
_MAP_HUGETLB = 0x40000

# Instructions of a BPF program. It has one register, into which it loads a word of struct seccomp_data.
_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

# Offsets in struct seccomp_data. An argument has eight bytes, and the lower four come first.
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16
_ARGUMENT_BYTES = 8

# What a filter returns. If there are several filters, the kernel takes the strictest answer.
_ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
_FAIL_WITH_EPERM = 0x00050001  # SECCOMP_RET_ERRNO | EPERM
_FAIL_WITH_ENOENT = 0x00050002  # SECCOMP_RET_ERRNO | ENOENT
_KILL_PROCESS = 0x80000000  # SECCOMP_RET_KILL_PROCESS

_FIRST_X32_NUMBER = 0x40000000


def zygote_filter() -> bytes:
    """Return the filter of a zygote, as a BPF program that allows only the calls of the tables.

    The kernel runs it from the top at every system call, so a frequent call should come early.
    """
    machine = os.uname().machine  # one of ARCHITECTURES; see `lockdown.has_seccomp`

    # The 32-bit interface of a 64-bit kernel has other numbers, so a process that uses it is killed.
    program = [
        _instruction(_LOAD_WORD, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_IF_EQUAL, ARCHITECTURES[machine], if_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
    ]

    # From here to the end, the register has the number of the call.
    program.append(_instruction(_LOAD_WORD, _NUMBER_OFFSET))
    if machine == "x86_64":  # x32 has the same architecture constant, and other numbers
        program += [
            _instruction(_JUMP_IF_AT_LEAST, _FIRST_X32_NUMBER, if_false=1),
            _instruction(_RETURN, _KILL_PROCESS),
        ]
    program += _answer_all(ALLOWED, _ALLOW)
    program += _answer_all(ZYGOTE_ONLY, _ALLOW)
    program += _answer_all(PATH_LOOKUPS, _FAIL_WITH_ENOENT)

    # A block loads an argument into the register. It never reaches the next instruction, because it ends with a return.
    any_huge_page_flag = _instruction(_JUMP_IF_ANY_BIT, _MAP_HUGETLB, if_true=1)
    program += _argument_block(_MMAP, _MMAP_FLAGS_ARGUMENT, [any_huge_page_flag])
    for rule in ARGUMENT_RULES:
        tests = [_instruction(_JUMP_IF_EQUAL, value, if_false=1) for value in rule.allowed.values()]
        program += _argument_block(rule.numbers, rule.argument, tests)

    program.append(_instruction(_RETURN, _FAIL_WITH_EPERM))
    return b"".join(program)


def child_filter() -> bytes:
    """Return the additional filter of a zygote's children, which denies the calls that only a zygote needs.

    The first filter stays active and has already checked the architecture.
    """
    program = [_instruction(_LOAD_WORD, _NUMBER_OFFSET)]
    program += _answer_all(ZYGOTE_ONLY, _FAIL_WITH_EPERM)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def _answer_all(table: dict[str, Numbers], answer: int) -> list[bytes]:
    """Return the instructions that give one answer to all calls of a table."""
    instructions = []
    for numbers in table.values():
        number = _number_here(numbers)
        if number is not None:
            instructions.append(_instruction(_JUMP_IF_EQUAL, number, if_false=1))
            instructions.append(_instruction(_RETURN, answer))
    return instructions


def _argument_block(numbers: Numbers, argument: int, tests: Iterable[bytes]) -> list[bytes]:
    """Return the instructions that allow a call if its argument passes a test, and otherwise fail it with EPERM.

    A test is a jump that continues with the next instruction if the call is allowed, and else skips it.
    """
    number = _number_here(numbers)
    assert number is not None  # true of all rules
    block = [_instruction(_LOAD_WORD, _ARGUMENTS_OFFSET + _ARGUMENT_BYTES * argument)]
    for test in tests:
        block.append(test)
        block.append(_instruction(_RETURN, _ALLOW))
    block.append(_instruction(_RETURN, _FAIL_WITH_EPERM))
    return [_instruction(_JUMP_IF_EQUAL, number, if_false=len(block)), *block]


def _number_here(numbers: Numbers) -> int | None:
    """Return the number of a call on this machine's architecture."""
    return numbers[list(ARCHITECTURES).index(os.uname().machine)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one BPF instruction, struct sock_filter. The jumps are numbers of instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
