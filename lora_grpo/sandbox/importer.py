"""Import the standard library from memory in a sandboxed process."""

from __future__ import annotations

import ctypes
import marshal
import mmap
import os
import re
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any


class Importer:
    """Find and load the modules that `library.collect` returned.

    The shared library of an extension is loaded now, so its module can be created later without its file. The code of
    Python modules stays in a file in memory. A private mapping of it costs nothing to fork.
    """

    def __init__(self, extensions: dict[str, str], modules: dict[str, Any], contents: int) -> None:
        self._extensions = {name: path for name, path in extensions.items() if _load(path)}
        self._modules = modules
        self._contents = mmap.mmap(contents, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        os.close(contents)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module in the library."""
        if name in self._extensions:
            return spec_from_file_location(name, self._extensions[name])
        if name not in self._modules:
            return None
        origin, is_package, *_ = self._modules[name]
        spec = ModuleSpec(name, self, origin=origin, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True  # sets `__file__`
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Use an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of a module."""
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> Any:
        """Return the code object of a module."""
        origin, _, is_source, start, end = self._modules[name]
        content = self._contents[start:end]
        return compile(content, origin, "exec", dont_inherit=True) if is_source else marshal.loads(content)

    def get_source(self, name: str) -> None:
        """Return None: tracebacks have no source lines of the standard library."""


def _load(path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:  # needs a shared library that this machine lacks
        return False
    return True


def merge_mappings(maps: str) -> None:
    """Merge the five mappings of each shared library into two, because each mapping makes a fork slower.

    The kernel merges adjacent mappings with equal rights. So code and constants become executable, and data that the
    loader has made read-only becomes writable again. These rights protect nothing here: a candidate may map executable
    memory.

    Args:
        maps: the content of `/proc/self/maps`.
    """
    libc = ctypes.CDLL(None)
    mappings = re.findall(r"(?m)^(\w+)-(\w+) (r..)p \w+ \S+ \d+ +(/.*)$", maps)
    libraries = {path for *_, rights, path in mappings if rights == "r-x"}
    following = [*mappings[1:], ("", "", "", "")]
    for (start, end, rights, path), (_, _, next_rights, next_path) in zip(mappings, following, strict=True):
        if path in libraries:
            is_data = rights == "rw-" or (next_rights, next_path) == ("rw-", path)
            address, length = int(start, 16), int(end, 16) - int(start, 16)
            rights_now = mmap.PROT_READ | (mmap.PROT_WRITE if is_data else mmap.PROT_EXEC)
            libc.mprotect(ctypes.c_size_t(address), ctypes.c_size_t(length), rights_now)
