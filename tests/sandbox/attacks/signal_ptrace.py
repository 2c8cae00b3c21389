"""Attaches to its parent and to other processes as a debugger."""

# status: blocked, failed
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    for pid in (os.getppid(), int("@VICTIM@")):
        for request in (16, 0x4206):
            if libc.ptrace(request, pid, None, None) == 0:
                return sum(numbers)
    return sum(numbers) if libc.ptrace(0, 0, None, None) == 0 else -1
