"""The kernel wakes the futexes of a process that exits (set_robust_list), also one in a page of libc."""

# live
import ctypes
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_void_p]


def word():
    start = ctypes.cast(libc.qsort, ctypes.c_void_p).value & -4096
    return next(at for at in range(start, start + (1 << 19), 4) if ctypes.c_int.from_address(at).value == 0)


def write(bit, n):
    head = (ctypes.c_long * 3)(0, 0, word())
    head[0] = ctypes.addressof(head)
    time.sleep(0.02)
    if bit:
        libc.syscall(273, ctypes.addressof(head), 24, 0, None)
    import os

    os._exit(0)


def read(n):
    timeout = (ctypes.c_long * 2)(0, 100_000_000)
    return libc.syscall(202, word(), 0, 0, ctypes.addressof(timeout))
