"""Collect the standard library into a file in memory, because a sandboxed process has no file system to import it from.

importer.py describes the file and reads it.
"""

import functools
import importlib.util
import marshal
import os
import subprocess
import sys
import sysconfig
import zoneinfo
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

from lora_grpo.sandbox.importer import LENGTH_BYTES, StoredModule
from lora_grpo.sandbox.memory_file import memory_file

LEFT_OUT = """
__pycache__ site-packages dist-packages test tests idlelib turtledemo tkinter lib2to3 distutils ensurepip venv
pydoc_data
"""
"""Folders whose modules need a display, new processes, or files, or are not part of the library."""

EXTENSIONS = """
_bisect _blake2 _bz2 _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _contextvars _csv _ctypes
_datetime _decimal _elementtree _hashlib _heapq _json _lsprof _lzma _md5 _multibytecodec _opcode _pickle
_posixsubprocess _random _sha1 _sha2 _sha256 _sha3 _sha512 _socket _sqlite3 _ssl _struct _typing array audioop
binascii cmath fcntl grp math mmap pyexpat resource select unicodedata zlib
"""
"""Extensions that are loaded before the fork. Each makes the fork of a process slower, by about 10 microseconds.

Left out: those that a Python module replaces if they are missing, such as `_asyncio`, and those that need a terminal,
new processes, or a server, such as `_curses`, `_multiprocessing`, and `syslog`.
"""


@functools.cache
def collect() -> int:
    """Return the descriptor of a file in memory with extensions' paths, the code of Python modules, and time zones."""
    extensions: dict[str, str] = {}
    modules: dict[str, tuple[object, ...]] = {}
    content = bytearray()
    for root in sorted({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}):
        for path in (root / "lib-dynload").glob("*.so"):
            name = path.name.partition(".")[0]
            if name in EXTENSIONS.split():
                extensions[name] = str(path)
        for path in _module_files(root):
            *parents, stem = path.relative_to(root).with_suffix("").parts
            is_package = stem == "__init__"
            if not is_package:
                parents.append(stem)
            name = ".".join(parents)
            code = read_code(name, str(path))
            end = len(content) + len(code.content)
            modules[name] = tuple(StoredModule(str(path), is_package, code.is_source, len(content), end))
            content += code.content
    _read_into_page_cache(extensions.values())
    table = marshal.dumps((extensions, modules, len(content)))
    time_zones = marshal.dumps(read_time_zones())
    return memory_file(len(table).to_bytes(LENGTH_BYTES, "little") + table + content + time_zones)


def _module_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of a folder and of the packages in it."""
    for folder, subfolders, _ in os.walk(root):
        packages = {name for name in subfolders if Path(folder, name, "__init__.py").exists()}
        subfolders[:] = packages - set(LEFT_OUT.split())  # os.walk visits only what remains
        yield from Path(folder).glob("*.py")


@dataclass(frozen=True)
class ModuleCode:
    """The code of a module, in the form in which it is stored."""

    content: bytes
    is_source: bool
    """The content is source, or else a code object in marshal's format."""


def read_code(name: str, path: str) -> ModuleCode:
    """Return a module's compiled code if Python has cached it, or else its source."""
    if Path(importlib.util.cache_from_source(path)).exists():
        return ModuleCode(marshal.dumps(SourceFileLoader(name, path).get_code(name)), is_source=False)
    return ModuleCode(Path(path).read_bytes(), is_source=True)


def read_time_zones() -> dict[str, bytes]:
    """Return the files of the time zones of this machine, or of the package `tzdata`, by name."""
    folders = list(zoneinfo.TZPATH)
    package = importlib.util.find_spec("tzdata")
    if package:
        folders += [f"{folder}/zoneinfo" for folder in package.submodule_search_locations or ()]
    names = zoneinfo.available_timezones()
    zones = {}
    for folder in reversed(folders):  # as in `zoneinfo`, the first folder wins
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                zones[name] = path.read_bytes()
    return zones


_READ_LIBRARIES = """
import ctypes, sys
for path in sys.argv[1:]:
    try: ctypes.CDLL(path)
    except OSError: pass  # needs a shared library that this machine lacks
paths = {sys.executable}
for line in open("/proc/self/maps"):  # each mapping, with the path of its file at the end of the line
    if ".so" in line: paths.add(line[line.find("/"):].rstrip("\\n"))
for path in paths: open(path, "rb").read()
"""


def _read_into_page_cache(extensions: Iterable[str]) -> None:
    """Read the shared libraries of the interpreter and its extensions.

    Otherwise, the first program that uses a page would make it faster for all later ones, which could measure that.
    """
    subprocess.run([interpreter(), "-I", "-S", "-c", _READ_LIBRARIES, *extensions], check=True)


def interpreter() -> str:
    """Return the interpreter itself, not the link in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
