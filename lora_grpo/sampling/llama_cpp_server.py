"""A llama.cpp server in a process of its own, so that a crash of llama.cpp is an error message."""

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
from lora_grpo.errors import RunError, UserError, first_line

PROGRAM = "llama-server"
_POLL_SECONDS = 0.05
_EXTRA = "llama-cpp"
_LONGEST_LINE = 300


def find_program(path: Path) -> list[str]:
    """Return the command of a llama.cpp server that can run a GGUF file, or raise a UserError if there is none."""
    if program := shutil.which(PROGRAM):
        return [program]
    if importlib.util.find_spec("xllamacpp"):
        # As a script, without this package, which would take seconds to import.
        return [sys.executable, "-P", str(Path(__file__).with_name("xllamacpp_server.py"))]
    raise UserError(
        f"{path} needs llama.cpp, which is not installed; run `pip install 'lora-grpo[{_EXTRA}]'`, "
        f"or put its {PROGRAM} on the PATH"
    )


class LlamaServer:
    """A running server of one GGUF file. It ends with this object and with this process.

    Args:
        path: the GGUF file.
        slots: number of completions that are decoded at once.
        slot_tokens: longest prompt plus completion.

    Raises:
        UserError: llama.cpp is not installed, or cannot load the file.
    """

    def __init__(self, path: Path, *, slots: int, slot_tokens: int) -> None:
        import httpx

        self.path = path
        port = _free_port()
        program = find_program(path)
        self._of_user = len(program) == 1
        command = [*program, "--model", str(path), "--host", "127.0.0.1", "--port", str(port), "--jinja"]
        command += ["--parallel", str(slots), "--ctx-size", str(slots * slot_tokens)]
        if threads := os.environ.get("OMP_NUM_THREADS"):  # PyTorch uses as many
            command += ["--threads", threads]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Rows do not return, so a copy of each finished prompt would only fill the memory.
            env=os.environ | {"LLAMA_ARG_CACHE_RAM": "0"},
            preexec_fn=functools.partial(sandbox.die_with_parent, os.getpid()),
        )
        self.close = weakref.finalize(self, _stop, self._process)
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(3600, connect=10), trust_env=False
        )
        self.build = self._wait()
        """Which llama.cpp this is."""

    def _wait(self) -> str:
        """Wait until the model is loaded, and return which llama.cpp has loaded it."""
        import httpx

        while self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                properties = self._client.get("/props").json() if self._client.get("/health").is_success else {}
                # Another program may have taken the port.
                if self._process.poll() is None and properties.get("model_path") == str(self.path):
                    mine = f"of xllamacpp {metadata.version('xllamacpp')}" if not self._of_user else ""
                    return mine or str(properties.get("build_info"))
            time.sleep(_POLL_SECONDS)
        raise UserError(
            f"llama.cpp cannot load {self.path} ({self._why_ended()}); export it again, or update llama.cpp"
        )

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer.

        Raises:
            RunError: the server has ended or refuses the request.
        """
        import httpx

        try:
            answer = self._client.post(route, json=body)
        except httpx.HTTPError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes before the process ends
                self._process.wait(1)
            reason = first_line(error) if self._process.poll() is None else self._why_ended()
            raise RunError(f"llama.cpp no longer answers ({reason}); run the command again to continue") from error
        if answer.status_code != 200:  # with 404 for a route that this llama.cpp does not have
            raise RunError(
                f"llama.cpp refuses {route} (HTTP {answer.status_code}: {' '.join(answer.text.split())[:500]}); update "
                "llama.cpp, or run the command again"
            )
        found: dict[str, Any] = answer.json()
        return found

    def _why_ended(self) -> str:
        """Return the exit code, and the first line of the server's output that speaks of an error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        found = [
            line.strip()[-_LONGEST_LINE:] for line in lines if re.search("error|assert|abort", line, re.IGNORECASE)
        ]
        return ": ".join([f"code {self._process.wait()}", *found[:1]])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
