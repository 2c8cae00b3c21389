"""An exit code that passes through the memory of the zygote could stay there, and later programs get a copy."""

import ctypes
import os

new = ctypes.pythonapi.PyBytes_FromStringAndSize
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]


def write(bit, n):
    os._exit(91 if bit else 37)


def read(n):
    # Uninitialized memory, in which freed objects of the zygote are still readable.
    found = [new(None, size) for size in range(1, 500) for _ in range(20)]

    return [sum(b"\0" + bytes([code]) + b"\0\0" in part for part in found) for code in (91, 37)]
