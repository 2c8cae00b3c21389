"""As `exit_code`, with the signal that ends the program."""

import ctypes
import os
import struct

new = ctypes.pythonapi.PyBytes_FromStringAndSize
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]


def write(bit, n):
    import signal

    signal.setitimer(signal.ITIMER_REAL if bit else signal.ITIMER_VIRTUAL, 0.001)
    while True:
        pass


def read(n):
    return sorted({new(None, 5)[-4:].hex() for _ in range(300)})
