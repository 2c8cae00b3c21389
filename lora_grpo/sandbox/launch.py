"""Start the sandbox's interpreters, directly or in bubblewrap."""

import os
import shutil
import site
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.sandbox.library import collect, interpreter

# Both packages are empty modules here, because the imports of their own `__init__.py` need pydantic.
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

# If memory runs out, the kernel kills these processes first, not the training run. Children inherit the setting.
_KILLED_FIRST = ["/bin/sh", "-c", '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"', "sh"]


@dataclass(frozen=True)
class Zygote:
    """A process that forks a child for each program."""

    process: subprocess.Popen[bytes]
    """Its outer process, in bubblewrap; the leader of its process group."""
    control: socket.socket
    """The socket for commands. The process sends `!` when it is ready; see zygote.py for the rest."""


def start_zygote(role: str, tier: str, memory_bytes: int, cpu_seconds: int) -> Zygote:
    """Start a zygote; `zygote.main` describes the arguments."""
    library = collect()
    our_end, its_end = socket.socketpair()

    # A program may print any text, also a lone surrogate.
    environment = {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters need it to find libpython
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]

    folder = str(Path(__file__).parent)
    command = list(_KILLED_FIRST)
    if tier == "bubblewrap":
        command += _bubblewrap(folder)
    # Not -I, because it ignores the hash seed, and the order of sets would vary between runs.
    command += [interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOTSTRAP, folder, role, tier]
    command += [str(its_end.fileno()), str(library), str(memory_bytes), str(cpu_seconds)]

    with its_end:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(its_end.fileno(), library),
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
    return Zygote(process, our_end)


def _bubblewrap(folder: str) -> list[str]:
    """Return the bubblewrap command for a root with the interpreter, the system's libraries, and this folder."""
    # Not --die-with-parent, because it refers to the starting thread. A zygote exits when its control socket closes.
    # Not --dev, because it includes a writable /dev/shm.
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--cap-drop", "ALL"]

    library_folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for path in dict.fromkeys(["/usr", "/lib", "/lib64", sys.base_prefix, *library_folders]):
        if path:
            command += ["--ro-bind-try", path, path]

    # Hide installed packages with empty folders.
    for packages in site.getsitepackages([sys.base_prefix]):
        if Path(packages).is_dir():
            command += ["--tmpfs", packages]
    return [*command, "--ro-bind", folder, folder, "--remount-ro", "/", "--chdir", "/"]
