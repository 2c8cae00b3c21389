"""Permanently drop access to files, system calls, capabilities, and resources in a sandboxed process.

No privileges are required. Landlock blocks access to the file system. seccomp allows only the system calls listed here.
Resource limits bound memory, CPU time, and descriptors. On old kernels, the functions raise OSError before they change
anything.

The list allows the calls that computation needs. Any other call fails with EPERM, which Python reports as
PermissionError: a new process, a socket, access to other processes or to kernel facilities. A zygote must also fork,
kill, and communicate with its parent. A second filter denies these calls to its children.

Threads are not allowed, although they would stay in the process. Each takes the next number of the machine's process
ids, and so sets the id of the program that follows: `thread_ids` in tests/sandbox/attacks/pairs.py passes a bit that
way. A filter cannot count them either, and RLIMIT_NPROC does not limit root. Event loops need no call beyond those
listed, because a loop without threads is woken only by its own clock; see adapt.py.

There is no file system. Opening a file fails with EPERM, as any access that the sandbox forbids. Looking up a path
fails with ENOENT, because `Path.exists` and parts of the standard library expect that error and no other.

Source: linux/landlock.h, linux/capability.h, linux/seccomp.h, linux/filter.h, prctl(2), seccomp(2); numbers from
asm/unistd_64.h and asm-generic/unistd.h.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT, _LANDLOCK_VERSION = 444, 446, 1
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_DESCRIPTORS, _STACK_BYTES = 32, 64 << 20

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
clone 56 220, kill 62 129, sendto 44 206, recvmsg 47 212, wait4 61 260, prctl 157 167, setpgid 109 154,
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

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the ABI version of Landlock in a Linux kernel, or 0 if Landlock is not available."""
    return max(0, _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION))


def has_seccomp() -> bool:
    """Return whether the kernel supports seccomp and the tables have the numbers for this architecture."""
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
    """Drop access to the file system. Newer kernels also block TCP and signals to other processes."""
    version = landlock_version()
    # All rights that the version supports. Rights that are handled but not granted are denied.
    files = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        files |= (1 << bit) if version >= since else 0
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("<QQQ", files, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    size = ctypes.c_size_t(len(attributes))
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def permissions() -> bytes:
    """Return the seccomp filter of a zygote, as a BPF program that allows only the calls of the tables."""
    machine = os.uname().machine  # one of ARCHITECTURES; see `has_seccomp`
    column = list(ARCHITECTURES).index(machine)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _KILL),  # the 32-bit interface, which has different system call numbers
        _line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, 0x40000000, 0, 1), _line(_RETURN, _KILL)]  # x32
    lines += [*_verdicts(_ALLOW, f"{_ALLOWED},{_ZYGOTE}"), *_verdicts(_ENOENT, _ABSENT)]
    for numbers, index, values in ((_MMAP, 3, ()), *_LIMITED):
        # The kernel reads only the lower 32 bits of fcntl and ioctl commands and of a pid, so only those are compared.
        tests = [_line(_EQUAL, value, 0, 1) for value in values] or [_line(_ANY_BIT, _MAP_HUGETLB, 1, 0)]
        allowed = [line for test in tests for line in (test, _line(_RETURN, _ALLOW))]
        block = [_line(_LOAD, _ARGUMENTS + 8 * index), *allowed, _line(_RETURN, _EPERM)]
        lines += [_line(_EQUAL, numbers[column], 0, len(block)), *block]
    return b"".join([*lines, _line(_RETURN, _EPERM)])


def denials() -> bytes:
    """Return the additional filter of a zygote's children, which denies the calls that only a zygote needs."""
    return b"".join([_line(_LOAD, _NUMBER), *_verdicts(_EPERM, _ZYGOTE), _line(_RETURN, _ALLOW)])


def _verdicts(verdict: int, table: str) -> list[bytes]:
    """Return the instructions that give one verdict on all calls of a table."""
    column = 1 + list(ARCHITECTURES).index(os.uname().machine)
    numbers = [entry.split()[column] for entry in table.split(",")]
    tests = [(_line(_EQUAL, int(number), 0, 1), _line(_RETURN, verdict)) for number in numbers if number != "-"]
    return [line for lines in tests for line in lines]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one BPF instruction. The jumps are numbers of instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def limit_system_calls(program: bytes) -> None:
    """Install a seccomp filter in addition to earlier ones.

    The long allow list takes most of a millisecond to install, so only the zygote installs it. Its children add the
    short one.
    """
    lines = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, padding, address of the instructions.
    header = struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(lines))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


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
