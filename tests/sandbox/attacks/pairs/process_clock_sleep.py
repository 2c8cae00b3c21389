"""Whether the other program still runs, by waiting for its CPU time clock. Worked under Landlock."""

# live
import ctypes
import os
import time

libc = ctypes.CDLL(None, use_errno=True)


def exists(pid):
    return libc.syscall(230, ~pid << 3 | 2, 0, (ctypes.c_long * 2)(0, 1), None) == 0


def write(bit, n):
    if bit:
        time.sleep(0.15)


def read(n):
    time.sleep(0.05)
    return sum(exists(os.getpid() + step) for step in range(-4, 5) if step) > 2
