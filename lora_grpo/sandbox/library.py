"""Collect the standard library in memory, because a sandboxed process has no file system to import it from."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = """
__pycache__ site-packages dist-packages test tests idlelib turtledemo tkinter lib2to3 distutils ensurepip venv
pydoc_data
"""
EXTENSIONS = """
_bisect _blake2 _bz2 _contextvars _csv _ctypes _datetime _decimal _elementtree _heapq _json _lzma _md5 _opcode
_pickle _posixsubprocess _random _sha1 _sha2 _sha256 _sha3 _sha512 _socket _struct _typing array binascii cmath
fcntl grp math mmap pyexpat resource select unicodedata zlib
"""
"""Extensions that are loaded before the fork. Each makes the fork of a process slower, by about 10 microseconds."""

Module = tuple[str, bool, bool, int, int]
"""A Python module: its path, whether it is a package, whether its content is source, and where the content is."""


def interpreter() -> str:
    """Return the interpreter itself, not the link in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def collect() -> tuple[dict[str, str], dict[str, Module], int]:
    """Return the paths of extensions, the Python modules, and the descriptor of a file in memory with their content."""
    extensions: dict[str, str] = {}
    modules: dict[str, Module] = {}
    content = bytearray()
    roots = sorted({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
    folders = [("", root) for root in roots]
    for prefix, folder in folders:  # grows by packages
        for path in folder.iterdir():
            stem = path.name.partition(".")[0]
            name, is_package = prefix + stem, (path / "__init__.py").is_file()
            if stem in LEFT_OUT.split():
                continue
            if path.name == "lib-dynload":
                folders.append(("", path))
            elif path.suffix == ".so" and name in EXTENSIONS.split():
                extensions[name] = str(path)
            elif is_package or (path.suffix == ".py" and stem != "__init__"):
                file = path / "__init__.py" if is_package else path
                is_source, code = read_code(file)
                modules[name] = (str(file), is_package, is_source, len(content), len(content) + len(code))
                content += code
                if is_package:
                    folders.append((f"{name}.", path))
    _read_shared_libraries(extensions)
    return extensions, modules, memory_file(bytes(content))


def read_code(path: Path) -> tuple[bool, bytes]:
    """Return whether it is source, and a module's compiled code if Python has cached it, or else its source."""
    source, information = path.read_bytes(), path.stat()
    times = struct.pack("<2I", int(information.st_mtime) & 0xFFFFFFFF, len(source))
    with contextlib.suppress(OSError):
        cached = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        flags = int.from_bytes(cached[4:8], "little")  # 0: valid with these times, 1: always valid
        if cached[:4] == importlib.util.MAGIC_NUMBER and (flags == 1 or (flags == 0 and cached[8:16] == times)):
            return False, cached[16:]
    return True, source


_SHOW_MAPPINGS = """
import ctypes, sys
for path in sys.argv[1:]:
    try: ctypes.CDLL(path)
    except OSError: pass  # needs a shared library that this machine lacks
print(open("/proc/self/maps").read())
"""


def _read_shared_libraries(extensions: dict[str, str]) -> None:
    """Read the shared libraries of the interpreter and its extensions into the page cache.

    Otherwise, the first program that uses a page would make it faster for all later ones, which could measure that.
    """
    command = [interpreter(), "-I", "-S", "-c", _SHOW_MAPPINGS, *extensions.values()]
    maps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for path in {interpreter(), *(line[line.find("/") :] for line in maps.splitlines() if ".so" in line)}:
        Path(path).read_bytes()


def memory_file(content: bytes) -> int:
    """Return the descriptor of an anonymous file with this content, positioned at the start."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
