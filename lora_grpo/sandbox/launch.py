"""Start the sandbox's interpreters, directly or in bubblewrap, without access to the project's files."""

from __future__ import annotations

import marshal
import os
import shutil
import site
import socket
import subprocess
import sys
import threading
from pathlib import Path

from lora_grpo.sandbox import library

MODULES = ("codec", "syscalls", "lockdown", "candidate", "link", "examiner", "importer", "zygote")
"""Modules that a sandboxed process runs, in import order."""

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

_collecting = threading.Lock()


def start_process(role: str, isolation: str, limits: list[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote; `zygote.main` describes the arguments. It sends `!` on the returned socket when it is ready."""
    with _collecting:  # once, even if many threads start workers
        collected = library.collect()
    # The modules are sent as text through a descriptor, so the process does not need to read any project folder.
    modules = [(name, Path(__file__).with_name(f"{name}.py").read_text("utf-8")) for name in MODULES]
    sources = library.memory_file(marshal.dumps((modules, collected, limits)))
    ours, theirs = socket.socketpair()
    environment = {"PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters need it to find libpython
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    # Not -I, because it ignores the hash seed, and the order of sets would vary between runs.
    command = [library.interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOTSTRAP]
    command += [role, str(theirs.fileno()), str(sources), isolation]
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
            pass_fds=(theirs.fileno(), sources, collected[2]),
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(sources)
    return process, ours


def _bubblewrap(environment: dict[str, str]) -> list[str]:
    """Return the bubblewrap command for a root with only the interpreter and the system's shared libraries."""
    executable = shutil.which("bwrap")
    if executable is None:
        raise OSError("bubblewrap (bwrap) is not installed")
    # Not --die-with-parent, because it refers to the starting thread. A zygote exits when its control socket closes.
    # Not --dev, because it includes a writable /dev/shm. Only /dev/null is needed.
    command = [executable, "--unshare-all", "--cap-drop", "ALL", "--clearenv", "--dev-bind", *["/dev/null"] * 2]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    folders = ["/usr", "/lib", "/lib64", sys.base_prefix, *environment.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in filter(None, dict.fromkeys(folders)):
        command += ["--ro-bind-try", folder, folder]
    for packages in site.getsitepackages([sys.base_prefix]):
        if Path(packages).is_dir():  # hide it
            command += ["--tmpfs", packages]
    return [*command, "--remount-ro", "/", "--chdir", "/"]
