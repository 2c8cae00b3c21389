"""Import the standard library from memory, in a process without a file system.

library.py makes the file in memory that this module reads:

    length    of the table, in 8 bytes, little-endian
    table     (extensions, modules, zones_start), in marshal's format
                  extensions    paths of shared libraries by module name
                  modules       the fields of a `StoredModule` by module name
                  zones_start   where the time zones begin
    content   the modules, one after the other, and then the time zones: a dictionary of the contents of their files by
              name, in marshal's format

Positions in the content count from its start.
"""

import contextlib
import ctypes
import functools
import marshal
import mmap
import os
from importlib.machinery import ModuleSpec, SourcelessFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any, NamedTuple

from lora_grpo.sandbox.adapt import adapt

LENGTH_BYTES = 8


class StoredModule(NamedTuple):
    """A Python module in the file. marshal stores it as a plain tuple."""

    path: str
    """Its file on the disk, for `__file__` and tracebacks."""
    is_package: bool
    is_source: bool
    """The content is source, or else a code object in marshal's format."""
    start: int
    end: int
    """Positions in the content, in bytes."""


class Importer(SourcelessFileLoader):
    """Find and load the modules of the standard library. The base class executes the code of `get_code`.

    The shared library of an extension is loaded now, so its module can be created later without its file. The code of
    Python modules and the time zones stay in a file in memory. A private mapping of it costs nothing to fork.
    """

    def __init__(self, library: int) -> None:
        self._file = mmap.mmap(library, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        os.close(library)
        table_end = LENGTH_BYTES + int.from_bytes(self._file[:LENGTH_BYTES], "little")
        extensions, self._modules, zones_start = marshal.loads(self._file[LENGTH_BYTES:table_end])
        self._content_start = table_end
        self.time_zones = functools.cache(lambda: marshal.loads(self._file[table_end + zones_start :]))
        self._extensions: dict[str, str] = {}
        for name, path in extensions.items():
            with contextlib.suppress(OSError):  # it needs a shared library that this machine lacks
                ctypes.CDLL(path)
                self._extensions[name] = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module in the library."""
        if name in self._extensions:
            return spec_from_file_location(name, self._extensions[name])
        if name not in self._modules:
            return None
        module = StoredModule(*self._modules[name])
        spec = ModuleSpec(name, self, origin=module.path, is_package=module.is_package)
        spec.has_location = True  # sets `__file__`
        return spec

    def get_code(self, name: str) -> Any:
        """Return the code object of a module."""
        module = StoredModule(*self._modules[name])
        content = self._file[self._content_start + module.start : self._content_start + module.end]
        if module.is_source:
            return compile(content, module.path, "exec", dont_inherit=True)
        return marshal.loads(content)

    def exec_module(self, module: ModuleType) -> None:
        """Execute a module, and adapt it if it needs more than a sandboxed process has."""
        super().exec_module(module)
        adapt(module, self.time_zones)
