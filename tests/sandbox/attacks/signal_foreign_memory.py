"""Writes into another process's memory: process_vm_writev, process_madvise."""

# status: blocked, failed
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    here = ctypes.create_string_buffer(b"passed")
    vector = (ctypes.c_uint64 * 2)(ctypes.addressof(here), 6)
    for pid in (os.getppid(), int("@VICTIM@"), int("@PARENT@")):
        for number in (310, 311):
            if libc.syscall(number, pid, vector, 1, vector, 1, 0) > 0:
                return sum(numbers)
    return -1
