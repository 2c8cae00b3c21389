"""Start the sandbox's interpreters, directly or in bubblewrap, with the standard library in memory.

A sandboxed process has no file system to import it from.
"""

import functools
import importlib.util
import marshal
import os
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import zoneinfo
from importlib.machinery import SourceFileLoader
from pathlib import Path

# The packages are only named, because their own imports need pydantic.
_BOOTSTRAP = """
import sys, types
folder, *arguments = sys.argv[1:]
sys.argv[:] = [""]
for name, path in (("lora_grpo", []), ("lora_grpo.sandbox", [folder])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from lora_grpo.sandbox.zygote import main
main(*arguments)
"""


def start_process(role: str, isolation: str, *limits: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote; `zygote.main` describes the arguments. It sends `!` on the returned socket when it is ready."""
    collected = collect()
    ours, theirs = socket.socketpair()
    # A program may print any text, also a lone surrogate.
    environment = {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters need it to find libpython
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    folder = str(Path(__file__).parent)
    # Not -I, because it ignores the hash seed, and the order of sets would vary between runs.
    command = [interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOTSTRAP, folder, role, isolation]
    command += map(str, (theirs.fileno(), collected, *limits))
    # If memory runs out, the kernel kills these processes first, not the training run. Children inherit the setting.
    shell = ["/bin/sh", "-c", '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"', "sh"]
    with theirs:
        process = subprocess.Popen(
            [*shell, *(_bubblewrap(folder) if isolation == "bubblewrap" else ()), *command],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), collected),
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
    return process, ours


def _bubblewrap(folder: str) -> list[str]:
    """Return the bubblewrap command for a root with the interpreter, the system's libraries, and this folder."""
    # Not --die-with-parent, because it refers to the starting thread. A zygote exits when its control socket closes.
    # Not --dev, because it includes a writable /dev/shm.
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--cap-drop", "ALL"]
    folders = ["/usr", "/lib", "/lib64", sys.base_prefix, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for path in filter(None, dict.fromkeys(folders)):
        command += ["--ro-bind-try", path, path]
    for packages in site.getsitepackages([sys.base_prefix]):
        if Path(packages).is_dir():  # hide it
            command += ["--tmpfs", packages]
    return [*command, "--ro-bind", folder, folder, "--remount-ro", "/", "--chdir", "/"]


LEFT_OUT = """
__pycache__ site-packages dist-packages test tests idlelib turtledemo tkinter lib2to3 distutils ensurepip venv
pydoc_data
"""
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


def interpreter() -> str:
    """Return the interpreter itself, not the link in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def collect() -> int:
    """Return the descriptor of a file in memory with extensions' paths, the code of Python modules, and time zones.

    The file starts with the length of its table in eight bytes. The table, in marshal's format, has the path of each
    extension; for each Python module its path, whether it is a package, whether its content is source, and the offsets
    of its start and end after the table; and the offset of the time zones. They are a dictionary of names and the
    contents of their files, also in marshal's format.
    """
    extensions: dict[str, str] = {}
    modules: dict[str, tuple[str, bool, bool, int, int]] = {}
    content = bytearray()
    for root in sorted({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}):
        for path in (root / "lib-dynload").glob("*.so"):
            name = path.name.partition(".")[0]
            if name in EXTENSIONS.split():
                extensions[name] = str(path)
        for folder, folders, _ in os.walk(root):
            packages = [name for name in folders if Path(folder, name, "__init__.py").exists()]
            folders[:] = set(packages) - set(LEFT_OUT.split())
            for path in Path(folder).glob("*.py"):
                *parents, stem = path.relative_to(root).with_suffix("").parts
                is_package = stem == "__init__"
                name = ".".join(parents if is_package else (*parents, stem))
                is_source, code = read_code(name, str(path))
                modules[name] = str(path), is_package, is_source, len(content), len(content) + len(code)
                content += code
    # Read the shared libraries of the interpreter and its extensions into the page cache. Otherwise, the first program
    # that uses a page would make it faster for all later ones, which could measure that.
    subprocess.run([interpreter(), "-I", "-S", "-c", _READ_LIBRARIES, *extensions.values()], check=True)
    table = marshal.dumps((extensions, modules, len(content)))
    return memory_file(len(table).to_bytes(8, "little") + table + content + marshal.dumps(read_time_zones()))


_READ_LIBRARIES = """
import ctypes, sys
for path in sys.argv[1:]:
    try: ctypes.CDLL(path)
    except OSError: pass  # needs a shared library that this machine lacks
for path in {sys.executable, *(line[line.find("/"):-1] for line in open("/proc/self/maps") if ".so" in line)}:
    open(path, "rb").read()
"""


def read_code(name: str, path: str) -> tuple[bool, bytes]:
    """Return whether it is source, and a module's compiled code if Python has cached it, or else its source."""
    if Path(importlib.util.cache_from_source(path)).exists():
        return False, marshal.dumps(SourceFileLoader(name, path).get_code(name))
    return True, Path(path).read_bytes()


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


def memory_file(content: bytes) -> int:
    """Return the descriptor of an anonymous file with this content."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor
