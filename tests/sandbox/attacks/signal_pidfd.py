"""Takes descriptors out of other processes: pidfd_open and pidfd_getfd."""

# status: blocked, failed
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    for pid in (os.getppid(), int("@VICTIM@"), int("@PARENT@")):
        handle = libc.syscall(434, pid, 0)
        if handle >= 0 and any(libc.syscall(438, handle, number, 0) >= 0 for number in range(64)):
            return sum(numbers)
    return -1
