"""Start the sandbox's interpreters, directly or in bubblewrap, without access to the project's files."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

MODULES = ("codec", "syscalls", "lockdown", "candidate", "link", "examiner", "zygote")
"""Modules that a sandboxed process runs, in import order."""

_USERS_OF_LIBRARIES = ["bz2", "ctypes", "datetime", "decimal", "hashlib", "lzma", "math", "random", "uuid", "zlib"]

# The modules are sent as text through a descriptor, so the process does not need to read any project folder.
_BOOTSTRAP = """
import json, os, sys, types
role, control, sources, isolation = sys.argv[1:]
for name in ("lora_grpo", "lora_grpo.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
with os.fdopen(int(sources)) as file:
    modules, readable, limits = json.load(file)
    for name, source in modules:
        module = types.ModuleType("lora_grpo.sandbox." + name)
        sys.modules[module.__name__] = module
        setattr(sys.modules["lora_grpo.sandbox"], name, module)
        exec(compile(source, name + ".py", "exec"), module.__dict__)
sys.argv[:] = [""]
module.main(role, int(control), isolation, readable, limits)
"""


def start_process(role: str, isolation: str, limits: list[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote; `zygote.main` describes the arguments. It sends `!` on the returned socket when it is ready."""
    ours, theirs = socket.socketpair()
    folder = Path(__file__).parent
    modules = [(name, (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]
    readable = [str(path) for path in (*_standard_library(), *_libraries())] if isolation == "landlock" else []
    sources = memory_file(json.dumps([modules, readable, limits]).encode())
    # Not -I, because it ignores the hash seed, and the order of sets would vary between runs.
    python = [_interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOTSTRAP]
    command = [*python, role, str(theirs.fileno()), str(sources), isolation]
    environment = {"PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters need it to find libpython
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    if isolation == "bubblewrap":
        command = [*_bubblewrap(environment), *command]
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), sources),
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
    for path in (Path(_interpreter()), *_libraries(), *_standard_library()):
        command += ["--ro-bind", str(path), str(path)]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def _standard_library() -> list[Path]:
    """Return the files and folders of the standard library, without installed packages."""
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    installed = ("site-packages", "dist-packages")
    return [path for root in sorted(roots) for path in sorted(root.iterdir()) if path.name not in installed]


@functools.cache
def _libraries() -> tuple[Path, ...]:
    """Return the shared libraries of the interpreter and its extensions, under all names that the loader uses."""
    show = f"import importlib\nfor name in {_USERS_OF_LIBRARIES}:\n try: importlib.import_module(name)\n"
    show += " except ImportError: pass\nprint(open('/proc/self/maps').read())"
    maps = subprocess.run([_interpreter(), "-I", "-S", "-c", show], capture_output=True, text=True, check=True).stdout
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    libraries = {path for path in mapped if ".so" in path.name and path.is_absolute()}
    names = set()
    for folder in {path.parent for path in libraries} | {Path("/lib64"), Path("/lib")}:
        # The loader uses the library's soname, which is a link to the mapped file.
        if folder.is_dir():
            names |= {link for link in folder.iterdir() if ".so" in link.name and link.resolve() in libraries}
    aliases = {Path(alias, *path.parts[3:]) for path in names | libraries for alias in _merged_folders(path)}
    return tuple(sorted(libraries | names | aliases))


def _merged_folders(path: Path) -> list[Path]:
    """Return `/lib` for a path in `/usr/lib` if `/lib` is a link to it, as on most current systems."""
    if len(path.parts) < 4 or path.parts[1] != "usr":
        return []
    short = Path("/", path.parts[2])
    return [short] if short.is_symlink() and short.resolve() == Path("/usr", path.parts[2]) else []
