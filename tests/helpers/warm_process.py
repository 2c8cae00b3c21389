"""Runs scripts as commands: in forks of one process that has the heavy imports behind it, or in fresh interpreters.

What a recipe imports takes longer than what most tests have it do. A fork has imported it, and is in all else a
process of its own: with a pid to be killed by, a folder, an environment and an exit code. lora_grpo it imports itself.
It shares the seed of string hashes with the other forks, and cannot show which imports a command needs or does without:
each kind of command has a test that runs it fresh as well.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

IMPORTS = """
import docstring_parser, jinja2, pydantic, yaml
import matplotlib.backends.backend_agg, matplotlib.backends.backend_svg
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PrinterCallback, TrainerCallback
from transformers.models.qwen2 import modeling_qwen2
from trl import GRPOConfig, GRPOTrainer
"""
NUMBER = struct.Struct("i")


class Started:
    """A command that was started. What it says goes to files, which cannot fill up as a pipe does."""

    def __init__(self, pid: int, ended: socket.socket | subprocess.Popen[bytes], files: list[IO[bytes]]) -> None:
        self.pid, self._ended, self._files = pid, ended, files
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code, or what killed it below zero; None if it still runs after that time."""
        if self._code is None and isinstance(self._ended, subprocess.Popen):
            try:
                self._code = self._ended.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
        elif self._code is None and select.select([self._ended], [], [], timeout)[0]:
            with self._ended:
                (self._code,) = NUMBER.unpack(self._ended.recv(NUMBER.size))
        return self._code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """Kill it and whatever it started, and wait for its end."""
        os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def said(self) -> tuple[str, str]:
        """Return what came on standard output and standard error until now."""
        out, err = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in self._files)
        return out, err

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end and return what `subprocess.run` would."""
        code = self.wait()
        assert code is not None
        return subprocess.CompletedProcess(str(self.pid), code, *self.said())


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def new_files() -> list[IO[bytes]]:
    return [tempfile.TemporaryFile() for _ in ("standard output", "standard error")]


class FreshInterpreters:
    """Starts every command as a person does."""

    def start(self, *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Started:
        """Start a script with its arguments, in a session of its own."""
        files = new_files()
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
        )
        return Started(process.pid, process, files)


class WarmProcess:
    """Starts every command as a fork of one process, which begins its imports at once.

    Args:
        name: identifies the process. The first user of a name starts it; later users share it.
    """

    def __init__(self, name: str) -> None:
        address = f"\0lora_grpo-warm-{name}"
        with new_socket() as listener, contextlib.suppress(OSError):
            listener.bind(address)  # fails if the process exists
            listener.listen()
            # It returns as soon as it has forked: what serves is no child of this process, which tests count and kill.
            subprocess.run([sys.executable, __file__], stdin=listener, stdout=subprocess.DEVNULL, check=True)
        self._control = new_socket()
        self._control.connect(address)

    def start(self, *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Started:
        """Start a script with its arguments, in a session of its own."""
        files = new_files()
        request = [[str(word) for word in command], str(cwd or Path.cwd()), dict(os.environ if env is None else env)]
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), *(file.fileno() for file in files)]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        packed_pid = ours.recv(NUMBER.size)
        assert packed_pid, "the warm process is gone"
        return Started(*NUMBER.unpack(packed_pid), ours, files)

    def close(self) -> None:
        """End the process that forks, unless others use it; commands go on."""
        self._control.close()


def serve() -> None:
    """Fork a process for every request, and end with the last user; returns in what is to be the command.

    Standard input is the socket on which users connect.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    exec(IMPORTS, {})
    gc.freeze()  # or every collection of a fork would copy it all
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    users = [listener.accept()[0]]
    while users:
        user = select.select([listener, *users], [], [])[0][-1]
        if user is listener:
            users.append(listener.accept()[0])
            continue
        request, descriptors, _, _ = socket.recv_fds(user, 1 << 20, 3)
        if not request:
            users.remove(user)
            user.close()
        elif os.fork() == 0:
            for inherited_socket in (listener, *users):
                inherited_socket.close()
            return fork_command(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def fork_command(request: tuple[list[str], str, dict[str, str]], reply_end: int, *files: int) -> None:
    """Fork the command, and wait for it in its parent, so that the process that forks need not."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reply = socket.socket(fileno=reply_end)
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        reply.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    os.setsid()
    reply.sendall(NUMBER.pack(os.getpid()))
    reply.close()
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    sys.argv[:], folder, environment = request
    if "PYTHONIOENCODING" in environment:  # read when an interpreter starts
        encoding, _, errors = environment["PYTHONIOENCODING"].partition(":")
        sys.stdout.reconfigure(encoding=encoding, errors=errors or "strict")
        sys.stderr.reconfigure(encoding=encoding)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:  # noqa: BLE001 - the interpreter's part: it shows what nobody caught
        traceback.print_exc()
        code = 1
    # An interpreter's end without its last part, which would copy all that was imported to free it.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(int(code))


def wait_for(process, condition):
    """Wait until something is so, while a started command still runs."""
    while not condition():
        assert process.wait(0.01) is None, process.said()


def finish(process):
    """Wait for a started command to end well, and return what it said."""
    done = process.end()
    assert done.returncode == 0, done.stderr
    return done


if __name__ == "__main__":
    serve()
