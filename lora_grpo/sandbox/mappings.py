"""Reduce the number of memory mappings, because each makes a fork slower.

Source: dl_iterate_phdr(3), elf(5), linux/elf.h.
"""

import ctypes
import mmap
from typing import Any

_LOAD, _RELRO = 1, 0x6474E552
_EXECUTABLE, _WRITABLE = 1, 2


class _Segment(ctypes.Structure):
    """Elf64_Phdr"""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "physical", "file_size", "size", "alignment")),
    )


class _Library(ctypes.Structure):
    """The start of struct dl_phdr_info."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("path", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("num_segments", ctypes.c_uint16),
    )


_Visitor = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
_libc = ctypes.CDLL(None)


def merge_mappings() -> None:
    """Give the mappings of each shared library as few different rights as possible.

    The kernel merges adjacent mappings with equal rights. So constants become executable, like the code beside them,
    and the tables that the linker made read-only become writable, like the data after them. This protects nothing
    here: a candidate may map executable memory, and change the rights of any memory of its own process.
    """
    read_only: list[tuple[int, int]] = []
    relocated: list[tuple[int, int]] = []

    def visit(info: Any, size: int, data: int | None) -> int:
        library = info.contents
        if b"/" in library.path:  # not the interpreter itself, or the kernel's library
            for segment in library.segments[: library.num_segments]:
                span = library.address + segment.address, library.address + segment.address + segment.size
                if segment.type == _LOAD and not segment.flags & (_EXECUTABLE | _WRITABLE):
                    read_only.append(span)
                elif segment.type == _RELRO:
                    relocated.append(span)
        return 0

    _libc.dl_iterate_phdr(_Visitor(visit), None)
    for spans, rights in ((read_only, mmap.PROT_READ | mmap.PROT_EXEC), (relocated, mmap.PROT_READ | mmap.PROT_WRITE)):
        for start, end in spans:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            # The linker leaves the last, partial page of its tables writable.
            last = end // mmap.PAGESIZE * mmap.PAGESIZE if spans is relocated else end
            _libc.mprotect(ctypes.c_size_t(first), ctypes.c_size_t(last - first), rights)
