"""Start the sandbox's interpreters, directly or in bubblewrap, without access to the project's files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import marshal
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

MODULES = ("codec", "syscalls", "lockdown", "candidate", "link", "examiner", "zygote")
"""Modules that a sandboxed process runs, in import order."""

_LEFT_OUT = """
__pycache__ site-packages dist-packages test tests idlelib turtledemo tkinter lib2to3 distutils ensurepip venv
pydoc_data
"""
_EXTENSIONS = """
_bisect _blake2 _bz2 _contextvars _csv _ctypes _datetime _decimal _elementtree _heapq _json _lzma _md5 _pickle
_posixsubprocess _random _sha1 _sha2 _sha256 _sha3 _sha512 _socket _struct _typing array binascii cmath fcntl grp math
mmap pyexpat resource select unicodedata zlib
"""
"""Extensions that are loaded before the fork. Each makes the fork of a process slower, by about 10 microseconds."""

Module = tuple[str, bool, bool, int, int]
"""A Python module: its path, whether it is a package, whether its content is source, and where the content is."""

_reading = threading.Lock()

# The modules are sent as text through a descriptor, so the process does not need to read any project folder.
_BOOTSTRAP = """
import marshal, os, sys, types
role, control, sources, isolation = sys.argv[1:]
for name in ("lora_grpo", "lora_grpo.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
with os.fdopen(int(sources), "rb") as file:
    modules, library, limits = marshal.load(file)
    for name, source in modules:
        module = types.ModuleType("lora_grpo.sandbox." + name)
        sys.modules[module.__name__] = module
        setattr(sys.modules["lora_grpo.sandbox"], name, module)
        exec(compile(source, name + ".py", "exec"), module.__dict__)
sys.argv[:] = [""]
module.main(role, int(control), isolation, library, limits)
"""


def start_process(role: str, isolation: str, limits: list[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote; `zygote.main` describes the arguments. It sends `!` on the returned socket when it is ready."""
    ours, theirs = socket.socketpair()
    folder = Path(__file__).parent
    modules = [(name, (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]
    with _reading:  # once, even if many threads start workers
        # The trusted process and the zygotes run the same interpreter, so they share the format of compiled modules.
        library = standard_library()
        if isolation != "none":
            _libraries()
    sources = memory_file(marshal.dumps((modules, library, limits)))
    # Not -I, because it ignores the hash seed, and the order of sets would vary between runs.
    python = [_interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOTSTRAP]
    command = [*python, role, str(theirs.fileno()), str(sources), isolation]
    environment = {"PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters need it to find libpython
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    if isolation == "bubblewrap":
        command = [*_bubblewrap(environment), *command]
    # If memory runs out, the kernel kills these processes first, not the training run. Children inherit the setting.
    command = ["/bin/sh", "-c", '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"', "sh", *command]
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), sources, library[2]),
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(sources)
    return process, ours


def memory_file(content: bytes) -> int:
    """Return the descriptor of an anonymous file with this content, positioned at the start."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("program", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _interpreter() -> str:
    """Return the interpreter itself, not the link in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _bubblewrap(environment: dict[str, str]) -> list[str]:
    """Return the bubblewrap command for a root with only the interpreter, its libraries, and the standard library."""
    executable = shutil.which("bwrap")
    if executable is None:
        raise OSError("bubblewrap (bwrap) is not installed")
    # Not --die-with-parent, because it refers to the starting thread. A zygote exits when its control socket closes.
    # Not --dev, because it includes a writable /dev/shm. Only /dev/null is needed.
    command = [executable, "--unshare-all", "--cap-drop", "ALL", "--clearenv", "--dev-bind", *["/dev/null"] * 2]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    roots = [path for root in _roots() for path in sorted(root.iterdir()) if path.name[-9:] != "-packages"]
    for path in (Path(_interpreter()), *_libraries(), *roots):
        command += ["--ro-bind", str(path), str(path)]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def _roots() -> list[Path]:
    """Return the folders of the standard library."""
    return sorted({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


@functools.cache
def standard_library() -> tuple[dict[str, str], dict[str, Module], int]:
    """Return the arguments of `zygote.Importer`: paths of extensions, Python modules, and a file with their content."""
    extensions: dict[str, str] = {}
    modules: dict[str, Module] = {}
    content = bytearray()

    def add(name: str, path: Path, is_package: bool) -> None:
        is_source, code = _code(path)
        modules[name] = (str(path), is_package, is_source, len(content), len(content) + len(code))
        content.extend(code)

    folders = [("", root) for root in _roots()]
    for prefix, folder in folders:
        for path in folder.iterdir():
            name = prefix + path.name.partition(".")[0]
            if path.name.partition(".")[0] in _LEFT_OUT.split():
                continue
            if path.suffix == ".py" and path.stem != "__init__":
                add(name, path, False)
            elif (path / "__init__.py").is_file():
                add(name, path / "__init__.py", True)
                folders.append((f"{name}.", path))
            elif path.name == "lib-dynload":
                folders.append(("", path))
            elif path.suffix == ".so" and name in _EXTENSIONS.split():
                extensions[name] = str(path)
    return extensions, modules, memory_file(bytes(content))


def _code(path: Path) -> tuple[bool, bytes]:
    """Return whether it is source, and a module's compiled code if Python has cached it, or else its source."""
    source, information = path.read_bytes(), path.stat()
    times = struct.pack("<2I", int(information.st_mtime) & 0xFFFFFFFF, len(source))
    with contextlib.suppress(OSError):
        cached = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        flags = int.from_bytes(cached[4:8], "little")  # 0: valid with these times, 1: always valid
        if cached[:4] == importlib.util.MAGIC_NUMBER and (flags == 1 or (flags == 0 and cached[8:16] == times)):
            return False, cached[16:]
    return True, source


@functools.cache
def _libraries() -> tuple[Path, ...]:
    """Return the shared libraries of the interpreter and its extensions, under all names that the loader uses."""
    show = "import ctypes, sys\nfor path in sys.argv[1:]:\n try: ctypes.CDLL(path)\n"
    show += " except OSError: pass\nprint(open('/proc/self/maps').read())"
    command = [_interpreter(), "-I", "-S", "-c", show, *standard_library()[0].values()]
    maps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    libraries = {path for path in mapped if ".so" in path.name and path.is_absolute()}
    names = set()
    for folder in {path.parent for path in libraries} | {Path("/lib64"), Path("/lib")}:
        # The loader uses the library's soname, which is a link to the mapped file.
        if folder.is_dir():
            names |= {link for link in folder.iterdir() if ".so" in link.name and link.resolve() in libraries}
    aliases = {Path(alias, *path.parts[3:]) for path in names | libraries for alias in _merged_folders(path)}
    for path in (Path(_interpreter()), *libraries):
        # Into the page cache. Otherwise, the first use of a page would make it faster for all later programs.
        path.read_bytes()
    return tuple(sorted(libraries | names | aliases))


def _merged_folders(path: Path) -> list[Path]:
    """Return `/lib` for a path in `/usr/lib` if `/lib` is a link to it, as on most current systems."""
    if len(path.parts) < 4 or path.parts[1] != "usr":
        return []
    short = Path("/", path.parts[2])
    return [short] if short.is_symlink() and short.resolve() == Path("/usr", path.parts[2]) else []
