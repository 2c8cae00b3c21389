"""Whether the other program still runs: a futex with priority inheritance names it as its owner. Worked under Landlock."""

# live
import ctypes
import os
import time

libc = ctypes.CDLL(None, use_errno=True)


def exists(pid):
    word = ctypes.c_int(pid)
    timeout = (ctypes.c_long * 2)(1, 0)  # long past
    libc.syscall(202, ctypes.byref(word), 6 | 128, 0, ctypes.byref(timeout))  # FUTEX_LOCK_PI_PRIVATE
    return ctypes.get_errno() != 3  # no such process


def write(bit, n):
    time.sleep(0.35 if bit else 0.1)


def read(n):
    near = [os.getpid() + step for step in range(-6, 7) if step]
    time.sleep(0.05)
    early = sum(map(exists, near))
    time.sleep(0.15)
    return early > sum(map(exists, near))
