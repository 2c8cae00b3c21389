"""A llama.cpp server for one GGUF file, in a process of its own, so that its crashes become error messages."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from lora_grpo import sandbox
from lora_grpo.commands import install_command
from lora_grpo.errors import RunError, UserError, first_line


class LlamaServer:
    """Starts a server, and sends it requests. It ends with this object and with this process.

    Args:
        model: the GGUF file.
        slots: number of completions that are decoded at once.
        slot_tokens: maximum length of a prompt and its completion.

    Raises:
        UserError: llama.cpp cannot load the file.
    """

    def __init__(self, model: Path, *, slots: int, slot_tokens: int) -> None:
        import httpx2

        port = _free_port()
        program = server_program(model)
        arguments = [*program, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--jinja"]
        arguments += ["--parallel", str(slots), "--ctx-size", str(slots * slot_tokens)]
        threads = os.environ.get("OMP_NUM_THREADS")  # PyTorch uses as many
        if threads:
            arguments += ["--threads", threads]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Each row is sampled once, so a copy of each finished prompt would only fill the memory.
            env=os.environ | {"LLAMA_ARG_CACHE_RAM": "0"},
            preexec_fn=functools.partial(sandbox.die_with_parent, os.getpid()),
        )
        self._stop = weakref.finalize(self, self.process.kill)
        self.address = f"http://127.0.0.1:{port}"
        timeout = httpx2.Timeout(3600, connect=10)
        self._client = httpx2.Client(base_url=self.address, timeout=timeout, trust_env=False)
        properties = self._wait_for(model)
        uses_xllamacpp = program[0] == sys.executable
        if uses_xllamacpp:
            self.version = f"of xllamacpp {metadata.version('xllamacpp')}"
        else:
            self.version = str(properties.get("build_info"))

    def _wait_for(self, model: Path) -> Mapping[str, Any]:
        """Return the properties of the server as soon as it has loaded the model."""
        import httpx2

        properties: Mapping[str, Any] = {}
        while properties.get("model_path") != str(model):  # another program may have taken the port
            if self.process.poll() is not None:
                raise UserError(
                    f"llama.cpp cannot load {model} ({self._why_ended()}); export it again, or update llama.cpp"
                )
            time.sleep(0.05)
            with contextlib.suppress(httpx2.HTTPError):  # not yet listening
                is_healthy = self._client.get("/health").is_success
                properties = self._client.get("/props").json() if is_healthy else {}
        return properties

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer, or raise a RunError if it has ended or rejects the request."""
        import httpx2

        try:
            answer = self._client.post(route, json=body)
        except httpx2.HTTPError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes before the process ends
                self.process.wait(1)
            reason = first_line(error) if self.process.poll() is None else self._why_ended()
            raise RunError(f"llama.cpp no longer answers ({reason}); run the command again to continue") from error
        if not answer.is_success:  # 404 for a route that this llama.cpp does not have
            message = " ".join(answer.text.split())[:500]
            raise RunError(f"llama.cpp rejects {route} ({message}); update llama.cpp")
        return dict(answer.json())

    def _why_ended(self) -> str:
        """Return the exit code, and the first line of the server's output that mentions an error."""
        exit_code = f"code {self.process.wait()}"
        self._log.seek(0)
        for line in self._log.read().decode(errors="replace").splitlines():
            if re.search("error|assert|abort", line, re.IGNORECASE):
                return f"{exit_code}: {line.strip()[-300:]}"
        return exit_code

    def close(self) -> None:
        """End the server."""
        self._stop()
        self.process.wait()


def server_program(path: Path) -> list[str]:
    """Return the command of a llama.cpp server that can run a GGUF file, or raise a UserError if there is none."""
    program = shutil.which("llama-server")
    if program:
        return [program]
    if importlib.util.find_spec("xllamacpp"):
        # As a script, without this package, which would take seconds to import.
        return [sys.executable, "-P", str(Path(__file__).with_name("xllamacpp_server.py"))]
    raise UserError(
        f"{path} needs llama.cpp, which is not installed; run `{install_command('lora-grpo[llama-cpp]')}`, or put its "
        "llama-server on the PATH"
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
