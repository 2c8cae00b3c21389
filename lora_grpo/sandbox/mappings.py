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
    changes: list[tuple[int, int, int]] = []  # start, end, new rights

    def visit(info: Any, size: int, data: int | None) -> int:
        library = info.contents
        if b"/" not in library.path:  # the interpreter itself, or the kernel's library
            return 0
        for segment in library.segments[: library.num_segments]:
            start = library.address + segment.address
            end = start + segment.size
            if segment.type == _LOAD and not segment.flags & (_EXECUTABLE | _WRITABLE):
                changes.append((start, end, mmap.PROT_READ | mmap.PROT_EXEC))
            elif segment.type == _RELRO:
                # The linker left the last page, which is not full, writable.
                changes.append((start, _page_of(end), mmap.PROT_READ | mmap.PROT_WRITE))
        return 0

    _libc.dl_iterate_phdr(_Visitor(visit), None)
    for start, end, rights in changes:
        size = end - _page_of(start)
        _libc.mprotect(ctypes.c_size_t(_page_of(start)), ctypes.c_size_t(size), rights)


def _page_of(address: int) -> int:
    """Return the start of the page that contains an address."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE
