"""Touching a page of a library reads it from the disk, but only the first time: a major page fault."""

import ctypes
import resource

PAGE = ctypes.cast(ctypes.pythonapi.Py_BytesMain, ctypes.c_void_p).value & -4096


def write(bit, n):
    if bit:
        ctypes.string_at(PAGE + (n % 40 << 12), 1)


def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    ctypes.string_at(PAGE + (n % 40 << 12), 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
