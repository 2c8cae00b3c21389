"""Whether the other program still runs: a futex with priority inheritance names it as its owner."""

# live
import ctypes
import os
import time

libc = ctypes.CDLL(None, use_errno=True)


def exists(pid):
    word = ctypes.c_int(pid)
    timeout = (ctypes.c_long * 2)(1, 0)  # long past
    libc.syscall(202, ctypes.byref(word), 6 | 128, 0, ctypes.byref(timeout))  # FUTEX_LOCK_PI_PRIVATE
    return ctypes.get_errno() == 110


def write(bit, n):
    if bit:
        time.sleep(0.15)


def read(n):
    time.sleep(0.05)
    return sum(exists(os.getpid() + step) for step in range(-4, 5) if step) > 2
