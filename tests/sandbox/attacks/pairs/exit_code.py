"""The exit code passes through the memory of the zygote, of which later programs get a copy. Worked in both tiers."""

import ctypes
import os
import struct

new = ctypes.pythonapi.PyBytes_FromStringAndSize
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]


def write(bit, n):
    os._exit(91 if bit else 37)


def read(n):
    # Uninitialized memory, in which freed objects of the zygote are still readable.
    found = b"".join(new(None, size) for size in range(1, 400) for _ in range(40))
    return struct.pack("<i", 91 << 8)[1:] in found, struct.pack("<i", 37 << 8)[1:] in found
