"""A process that runs agents, started by this one: lines of JSON in both directions, and an end that leaves nothing.

A process is the leader of a session. It is killed with its group, and with every process that has inherited its mark in
the environment, such as one that a program has started in a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.endpoint import LOOPBACK

MARK = "LORA_GRPO_AGENT"
"""The variable that marks an agent's processes: the number of the process that has started them, and a random one."""
_MAX_LINE_BYTES = 2**20
"""Maximum length of a line of standard output."""
_WITH_PARENT = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9,0,0,0);os.execvp(sys.argv[1],sys.argv[1:])"
"""A program that becomes another one, which the kernel kills when the process that started it ends."""
_ROUNDS_OF_KILLING = 20
"""A program that starts processes all the time is killed faster than it starts them, after a few rounds."""


class AgentProcess:
    """A running process. All methods run in the event loop.

    Attributes:
        mark: the value of `MARK` in its environment.
    """

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process = process
        self.mark = mark

    @classmethod
    async def start(cls, command: Sequence[str], folder: Path, log: Path, variables: Mapping[str, str]) -> AgentProcess:
        """Start a command in a folder.

        Args:
            log: the file that its standard error is appended to.
            variables: of the environment, besides those of this process.

        Raises:
            OSError: there is no such program.
        """
        mark = f"{os.getpid()}-{secrets.token_hex(16)}"
        # Sets of Python have the same order in every process, so that a resumed run plays the same.
        environment = {**os.environ, **_without_proxy(), "PYTHONHASHSEED": "0", **variables, MARK: mark}
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _WITH_PARENT, *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env=environment,
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        return cls(process, mark)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def send(self, entry: Mapping[str, Any]) -> None:
        """Write a line to its standard input. A process that has ended is noticed by `receive`."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps(entry).encode() + b"\n")
            await self._process.stdin.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next line of its standard output that is a JSON object, or None at its end.

        Other lines are what the program prints for people.

        Raises:
            ValueError: a line is longer than 1 MiB.
        """
        assert self._process.stdout
        while line := await self._process.stdout.readline():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                return entry
        return None

    async def ending(self) -> str:
        """Wait for the end of the process, and return how it ended: "ended with exit code 3"."""
        return ending(await self._process.wait())

    async def kill(self) -> None:
        """Kill the process and all that it has started, and wait until they are gone."""
        # What it starts meanwhile is found in the next round.
        for _ in range(_ROUNDS_OF_KILLING):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if not kill_marked(self.mark):
                break
            await asyncio.sleep(0.01)
        await self._process.wait()


def _without_proxy() -> dict[str, str]:
    """Return the variables with which clients reach the endpoint itself, and not through a proxy of the environment."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = f"{others},{LOOPBACK}" if others else LOOPBACK
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def ending(exit_code: int) -> str:
    """Return how a process ended, by its exit code, which is minus the number of a signal."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def kill_marked(mark: str) -> int:
    """Kill the processes of this user that have a mark in their environment, and return their number."""
    marked = f"{MARK}={mark}".encode()
    number = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if marked in variables:
                os.kill(int(folder.name), signal.SIGKILL)
                number += 1
        except (OSError, ValueError):  # another user's, or gone
            continue
    return number
