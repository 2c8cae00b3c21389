"""Makes processes by raw system calls: fork, vfork, clone, clone3, and by libc's own posix_spawn."""

# status: blocked, failed
import ctypes
import os
import signal

libc = ctypes.CDLL(None, use_errno=True)
arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD)


def total(numbers):
    for call in ((57,), (56, signal.SIGCHLD, 0, 0, 0, 0), (435, ctypes.byref(arguments), 88), (56, 0x4000 | 0x100 | 17, 0, 0, 0, 0)):
        pid = libc.syscall(*call)
        if pid == 0:
            os._exit(0)
        if pid > 0:
            return sum(numbers)
    return -1
