"""As `exit_code`, with the signal that ends the program."""

import ctypes
import os

new = ctypes.pythonapi.PyBytes_FromStringAndSize
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]


def write(bit, n):
    import signal

    signal.setitimer(signal.ITIMER_REAL if bit else signal.ITIMER_VIRTUAL, 0.001)
    while True:
        pass


def read(n):
    found = [new(None, size) for size in range(1, 500) for _ in range(20)]
    return [sum(bytes([number]) + b"\0\0\0" in part for part in found) for number in (14, 26)]
