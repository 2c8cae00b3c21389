"""Removes a page of a library from the page cache (madvise), which a later program notices as a page fault."""

import ctypes
import resource

libc = ctypes.CDLL(None, use_errno=True)
PAGE = ctypes.cast(libc.qsort, ctypes.c_void_p).value & -4096


def write(bit, n):
    ctypes.string_at(PAGE, 1)
    if bit:
        libc.madvise(ctypes.c_void_p(PAGE), ctypes.c_size_t(4096), 21)


def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    ctypes.string_at(PAGE, 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
