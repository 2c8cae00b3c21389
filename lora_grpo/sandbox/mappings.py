"""Reduce the number of memory mappings, because each makes a fork slower.

Source: dl_iterate_phdr(3), elf(5), linux/elf.h.
"""

import ctypes
import mmap
from typing import Any

# Types and flags of segments.
_LOAD = 1  # PT_LOAD: mapped from the file
_RELRO = 0x6474E552  # PT_GNU_RELRO: made read-only by the linker
_EXECUTABLE = 1
_WRITABLE = 2

_READ_AND_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class _Segment(ctypes.Structure):
    """Elf64_Phdr"""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_size", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("alignment", ctypes.c_uint64),
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
    new_rights: list[tuple[int, int, int]] = []  # start and end in bytes, rights

    def visit(info: Any, size: int, data: int | None) -> int:
        library = info.contents
        if b"/" not in library.path:  # the interpreter itself, or the kernel's library
            return 0
        for segment in library.segments[: library.num_segments]:
            start = library.address + segment.address
            end = start + segment.size
            is_constant = not segment.flags & (_EXECUTABLE | _WRITABLE)
            if segment.type == _LOAD and is_constant:
                new_rights.append((_start_of_page(start), end, _READ_AND_EXECUTE))
            elif segment.type == _RELRO:
                # The linker left the last page, which is not full, writable.
                new_rights.append((_start_of_page(start), _start_of_page(end), _READ_AND_WRITE))
        return 0

    _libc.dl_iterate_phdr(_Visitor(visit), None)
    for start, end, rights in new_rights:
        _libc.mprotect(ctypes.c_size_t(start), ctypes.c_size_t(end - start), rights)


def _start_of_page(address: int) -> int:
    """Return the start of the page that contains an address."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE
