"""The system calls of a sandboxed process: a seccomp allow list as BPF programs.

The list allows the calls that computation needs. Any other call fails with EPERM, which Python reports as
PermissionError: a new process, a socket, access to other processes or to kernel facilities. A zygote must also fork,
kill, and communicate with its parent. A second filter denies these calls to its children.

There is no file system. Opening a file fails with EPERM, as any access that the sandbox forbids. Looking up a path
fails with ENOENT, because `Path.exists` and parts of the standard library expect that error and no other.

Source: numbers from asm/unistd_64.h and asm-generic/unistd.h; structures from linux/seccomp.h and linux/filter.h.
"""

from __future__ import annotations

import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH constant of each architecture, in the order of the columns in the tables below."""

# Name, number on x86_64, number on aarch64 (- if there is none).
_ALLOWED = """
read 0 63, write 1 64, close 3 57, lseek 8 62, readv 19 65, writev 20 66, pread64 17 67,
dup 32 23, dup2 33 -, dup3 292 24,
mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128,
select 23 -, poll 7 -, pselect6 270 72, ppoll 271 73, sched_yield 24 124,
nanosleep 35 101, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -,
gettimeofday 96 169, time 201 -, times 100 153,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
uname 63 160, getrlimit 97 163, getrusage 98 165, getrandom 318 278, exit 60 93, exit_group 231 94
"""

# Look-ups of paths fail with ENOENT.
_ABSENT = """
getcwd 79 17, stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291, readlink 89 -, readlinkat 267 78,
access 21 -, faccessat 269 48, faccessat2 439 439
"""

# Calls that a zygote may make but its children may not.
_ZYGOTE = """
clone 56 220, kill 62 129, sendto 44 206, recvmsg 47 212, waitid 247 95, prctl 157 167, setpgid 109 154,
close_range 436 436, set_robust_list 273 99, rseq 334 293
"""

# Calls allowed only with certain values of one argument: (numbers, argument index, values).
_LIMITED = (
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN or F_SETSIG, which can signal other processes.
    ((72, 25), 1, (0, 1, 2, 3, 1030)),
    # TCGETS (isatty), FIONREAD, FIOCLEX, FIONCLEX. Not FIOASYNC or FIOSETOWN.
    ((16, 29), 1, (0x5401, 0x541B, 0x5451, 0x5450)),
    # prlimit64 and sched_getaffinity on the process itself. It cannot raise its hard limits.
    ((302, 261), 0, (0,)),
    ((204, 123), 0, (0,)),
    # clock_gettime, clock_getres, and clock_nanosleep, without the CPU time clocks of other processes.
    ((228, 113), 0, range(12)),
    ((229, 114), 0, range(12)),
    ((230, 115), 0, range(12)),
    # futex: WAIT, WAKE, and WAIT_BITSET (also with the real-time clock), all private. Two processes can meet at a futex
    # in a page that both map, such as one of libc, and a futex with priority inheritance names its owner by process id.
    ((202, 98), 1, (128, 129, 137, 393)),
    # madvise: MADV_DONTNEED and MADV_FREE. Other advice changes the page cache, which all processes share.
    ((28, 233), 2, (4, 8)),
)
_MMAP, _MAP_HUGETLB = (9, 222), 0x40000
"""Huge pages come from a pool that all processes share."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050002, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16


def permissions(machine: str) -> bytes:
    """Return the BPF program of a zygote's allow list for an architecture in `ARCHITECTURES`."""
    column = list(ARCHITECTURES).index(machine)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),  # the 32-bit interface, which has different system call numbers
        _line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, 0x40000000, 0, 1), _line(_RETURN, _KILL)]  # x32
    for verdict, table in ((_ALLOW, f"{_ALLOWED},{_ZYGOTE}"), (_ENOENT, _ABSENT)):
        lines += _verdicts(verdict, table, column)
    flags = [_line(_ANY_BIT, _MAP_HUGETLB, 1, 0), _line(_RETURN, _ALLOW)]
    limited = [(_MMAP, 3, flags)]
    for numbers, index, values in _LIMITED:
        # The kernel reads only the lower 32 bits of fcntl and ioctl commands and of a pid, so only those are compared.
        allowed = [line for value in values for line in (_line(_EQUAL, value, 0, 1), _line(_RETURN, _ALLOW))]
        limited.append((numbers, index, allowed))
    for numbers, index, allowed in limited:
        block = [_line(_LOAD, _ARGUMENTS + 8 * index), *allowed, _line(_RETURN, _EPERM)]
        lines += [_line(_EQUAL, numbers[column], 0, len(block)), *block]
    return b"".join([*lines, _line(_RETURN, _EPERM)])


def denials(machine: str) -> bytes:
    """Return the BPF program that denies children the calls that only a zygote needs."""
    column = list(ARCHITECTURES).index(machine)
    return b"".join([_line(_LOAD, _NUMBER), *_verdicts(_EPERM, _ZYGOTE, column), _line(_RETURN, _ALLOW)])


def _verdicts(verdict: int, table: str, column: int) -> list[bytes]:
    """Return the instructions that give one verdict on all calls of a table."""
    lines = []
    for entry in table.split(","):
        number = entry.split()[1 + column]
        if number != "-":
            lines += [_line(_EQUAL, int(number), 0, 1), _line(_RETURN, verdict)]
    return lines


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one BPF instruction. The jumps are numbers of instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
