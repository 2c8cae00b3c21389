"""Changes the limits and the priority of its parent, which later programs inherit."""

import ctypes
import os
import resource

libc = ctypes.CDLL(None, use_errno=True)


def write(bit, n):
    libc.syscall(302, os.getppid(), 7, (ctypes.c_ulong * 2)(20 + bit, 32), None)
    libc.setpriority(0, os.getppid(), 5 + bit)
    libc.prctl(29, 1000 + bit)


def read(n):
    return resource.getrlimit(resource.RLIMIT_NOFILE), libc.getpriority(0, 0), libc.prctl(30)
