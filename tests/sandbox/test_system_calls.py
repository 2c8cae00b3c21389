"""The seccomp filters answer system calls as their tables say, on both architectures; this machine has only one."""

import os
import struct
from types import SimpleNamespace

import pytest

from lora_grpo.sandbox import system_calls

ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050001
ENOENT = 0x00050002

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AUDIT_ARCH_I386 = 0x40000003


def answer(program: bytes, number: int, audit_arch: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a BPF program on a system call as the kernel does, and return its answer."""
    # struct seccomp_data: number, architecture, instruction pointer, six arguments.
    data = struct.pack("<IIQ6Q", number, audit_arch, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("<HBBI", program))
    register = 0
    position = 0
    while True:
        code, if_true, if_false, value = instructions[position]
        position += 1
        match code:
            case 0x20:  # load a word
                (register,) = struct.unpack_from("<I", data, value)
            case 0x15:  # jump if equal
                position += if_true if register == value else if_false
            case 0x35:  # jump if at least
                position += if_true if register >= value else if_false
            case 0x45:  # jump if any bit is set
                position += if_true if register & value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=AUDIT_ARCH)
def machine(request, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=request.param))
    return request.param


@pytest.mark.parametrize(
    ("table", "for_zygote", "for_child"),
    [
        (system_calls.ALLOWED, ALLOW, ALLOW),
        (system_calls.ZYGOTE_ONLY, ALLOW, EPERM),
        (system_calls.PATH_LOOKUPS, ENOENT, ENOENT),
    ],
    ids=["allowed", "zygote only", "path lookups"],
)
def test_every_call_of_a_table_gets_its_answer(machine, table, for_zygote, for_child):
    zygote_filter = system_calls.zygote_filter()
    child_filter = system_calls.child_filter()
    for numbers in table.values():
        number = numbers[list(AUDIT_ARCH).index(machine)]
        if number is None:
            continue
        first_answer = answer(zygote_filter, number, AUDIT_ARCH[machine])
        second_answer = answer(child_filter, number, AUDIT_ARCH[machine])
        assert first_answer == for_zygote
        # A child has both filters. The kernel takes the stricter answer, which is the lower number.
        assert min(first_answer, second_answer) == for_child


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ({"x86_64": 72, "aarch64": 25}, (0, 1030), ALLOW),  # fcntl, F_DUPFD_CLOEXEC
        ({"x86_64": 72, "aarch64": 25}, (0, 8), EPERM),  # F_SETOWN
        ({"x86_64": 16, "aarch64": 29}, (0, 0x5401), ALLOW),  # ioctl, TCGETS
        ({"x86_64": 16, "aarch64": 29}, (0, 0x5452), EPERM),  # FIOASYNC
        ({"x86_64": 302, "aarch64": 261}, (0,), ALLOW),  # prlimit64 of this process
        ({"x86_64": 302, "aarch64": 261}, (1,), EPERM),  # of another one
        ({"x86_64": 228, "aarch64": 113}, (11,), ALLOW),  # clock_gettime, CLOCK_TAI
        ({"x86_64": 228, "aarch64": 113}, (0xFFFFFFFA,), EPERM),  # the CPU time of another process
        ({"x86_64": 202, "aarch64": 98}, (0, 128), ALLOW),  # futex, FUTEX_WAIT_PRIVATE
        ({"x86_64": 202, "aarch64": 98}, (0, 0), EPERM),  # FUTEX_WAIT, which other processes can wake
        ({"x86_64": 28, "aarch64": 233}, (0, 0, 4), ALLOW),  # madvise, MADV_DONTNEED
        ({"x86_64": 28, "aarch64": 233}, (0, 0, 3), EPERM),  # MADV_WILLNEED
        ({"x86_64": 9, "aarch64": 222}, (0, 0, 0, 0x22), ALLOW),  # mmap, MAP_PRIVATE | MAP_ANONYMOUS
        ({"x86_64": 9, "aarch64": 222}, (0, 0, 0, 0x40022), EPERM),  # and MAP_HUGETLB
        ({"x86_64": 2, "aarch64": 56}, (), EPERM),  # open, openat
        ({"x86_64": 41, "aarch64": 198}, (), EPERM),  # socket
        ({"x86_64": 59, "aarch64": 221}, (), EPERM),  # execve
        ({"x86_64": 435, "aarch64": 435}, (), EPERM),  # clone3
    ],
)
def test_an_argument_decides(machine, call, arguments, expected):
    assert answer(system_calls.zygote_filter(), call[machine], AUDIT_ARCH[machine], arguments) == expected


def test_calls_with_the_numbers_of_another_interface_end_the_process(machine):
    zygote_filter = system_calls.zygote_filter()
    assert answer(zygote_filter, 0, AUDIT_ARCH_I386) == KILL
    x32_read = 0x40000000
    expected = KILL if machine == "x86_64" else EPERM
    assert answer(zygote_filter, x32_read, AUDIT_ARCH[machine]) == expected
