"""The program that runs the `agent` of a task file: `main`, with the arguments my_agent.py and BASE_URL.

It imports the file once, and forks a child for every episode, so that an agent may block, hang, exit or crash without
an effect on the others. A child is a copy of this process as it was after the import, and after a first request to
BASE_URL: what a client imports with its first request is then there. The child is the leader of a process group, which
is killed as a whole.

Lines of standard input, in JSON:

    {"id": 7, "seed": 123, "row": {...}, "base_url": "http://127.0.0.1:43121/SECRET/v1"}     start an episode
    {"kill": 7}                                                                              end it

Lines of standard output:

    {"ready": true}                                      the file was imported
    {"id": 7, "returned": 0.5}                           what the agent returned; a Verdict as a dictionary
    {"id": 7, "error": "my_agent.py:12: agent raised KeyError: 'x'"}

It ends when its standard input does, and then kills the children that are left.
"""

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import json
import os
import random
import selectors
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_grpo.agents.processes import ending
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import python_file
from lora_grpo.grading import Verdict
from lora_grpo.sandbox import die_with_parent

_MAX_ERROR = 2000
"""Maximum number of characters of an error."""


@dataclasses.dataclass
class _Child:
    """The process of an episode."""

    process_id: int
    exit: int
    """A descriptor that can be read when it has exited."""
    pipe: int
    """The descriptor of its result."""
    output: bytes = b""
    """What it has written so far."""

    def read(self) -> bool:
        """Read from the pipe. Return False at its end."""
        data = os.read(self.pipe, 2**16)
        self.output += data
        return bool(data)


class Host:
    """Starts children, reads their results, and writes them.

    Args:
        agent: the function of the task file.
        path: the task file.
        results: the file descriptor for lines of results.
    """

    def __init__(self, agent: Any, path: Path, results: int) -> None:
        self._agent = agent
        self._path = path
        self._results = results
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._requests = b""
        self._process_id = os.getpid()

    def run(self) -> None:
        """Serve standard input until it ends."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        if not self._read_requests():
                            return
                        continue
                    child = self._children.get(key.data)
                    if child is None:  # it was reported in this round
                        continue
                    if key.fd == child.exit:
                        self._report(key.data)
                    elif not child.read():
                        self._selector.unregister(child.pipe)
        finally:
            for child in self._children.values():
                _kill_group(child.process_id)

    def _read_requests(self) -> bool:
        """Act on the lines that have arrived. Return False at the end of the input."""
        data = os.read(sys.stdin.fileno(), 2**16)
        if not data:
            return False
        *lines, self._requests = (self._requests + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" not in request:
                self._start(request)
            elif request["kill"] in self._children:
                _kill_group(self._children[request["kill"]].process_id)
        return True

    def _start(self, request: dict[str, Any]) -> None:
        """Fork the child of an episode."""
        reading_end, writing_end = os.pipe()
        process_id = os.fork()
        if process_id == 0:
            try:
                self._run_child(request, writing_end)
            except BaseException:  # noqa: BLE001 - the end of the child is reported
                traceback.print_exc()
            finally:
                os._exit(1)  # nothing else of this process is the child's
        os.close(writing_end)
        with contextlib.suppress(OSError):  # the child does it, too; whoever is first
            os.setpgid(process_id, process_id)
        os.set_blocking(reading_end, False)
        child = _Child(process_id, os.pidfd_open(process_id), reading_end)
        self._children[request["id"]] = child
        self._selector.register(child.exit, selectors.EVENT_READ, request["id"])
        self._selector.register(child.pipe, selectors.EVENT_READ, request["id"])

    def _run_child(self, request: dict[str, Any], pipe: int) -> None:
        """Call the agent in the child, write the result to the pipe, and end the process."""
        os.setpgid(0, 0)
        die_with_parent(self._process_id)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The child has no part in the protocol of this process.
        self._selector.close()
        os.close(self._results)
        for child in self._children.values():
            os.close(child.exit)
            os.close(child.pipe)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)

        random.seed(request["seed"])
        os.environ["OPENAI_BASE_URL"] = request["base_url"]
        result = call_agent(self._agent, self._path, request["row"], request["base_url"])
        data = json.dumps(result).encode()
        while data:
            data = data[os.write(pipe, data) :]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _report(self, episode: int) -> None:
        """Write the result of a child that has exited, and end whatever it has started."""
        child = self._children.pop(episode)
        self._selector.unregister(child.exit)
        os.close(child.exit)
        _kill_group(child.process_id)  # before its number can be another's
        _, status = os.waitpid(child.process_id, 0)

        # What is left in the pipe. A process that the agent has started may hold it open.
        with contextlib.suppress(BlockingIOError):
            while child.read():
                pass
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.pipe)
        os.close(child.pipe)
        result = _parsed(child.output) or {
            "error": f"the agent's process {ending(os.waitstatus_to_exitcode(status))} before agent returned"
        }
        _write_line(self._results, {"id": episode, **result})


def call_agent(agent: Any, path: Path, row: dict[str, Any], base_url: str) -> dict[str, Any]:
    """Return {"returned": the agent's score} or {"error": what it raised}. The traceback goes to standard error."""
    try:
        returned = agent(row, base_url)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the run
        traceback.print_exc()
        line = python_file.line_of(error, path)
        message = f"{line}: agent raised {type(error).__name__}: {first_line(error)}"
        return {"error": message[:_MAX_ERROR]}
    return {"returned": _plain(returned)}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _plain(returned: Any) -> Any:
    """Return a score or a verdict as JSON has it, and anything else as a text in a list, which is no score."""
    if isinstance(returned, Verdict):
        return dataclasses.asdict(returned)
    if hasattr(returned, "item") and getattr(returned, "ndim", None) == 0:  # a NumPy or torch scalar
        returned = returned.item()
    if isinstance(returned, bool | int | float):
        return returned
    return [f"{returned!r:.60}"]


def _parsed(output: bytes) -> dict[str, Any] | None:
    """Return the result of a child, or None if it wrote none."""
    try:
        result = json.loads(output)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def _kill_group(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_id, signal.SIGKILL)


def _write_line(descriptor: int, entry: dict[str, Any]) -> None:
    data = json.dumps(entry).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def warm_up(base_url: str) -> None:
    """Send a request with OpenAI's client, if the task file has imported it.

    Its first request imports and compiles for 0.2 s, which every child would do again.
    """
    openai = sys.modules.get("openai")
    if openai is None:
        return

    async def request() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": ""}])

    with contextlib.suppress(openai.OpenAIError):  # the agent's own requests report what is wrong
        asyncio.run(request())
    gc.collect()
    gc.freeze()  # a child's garbage collection does not copy what it shares with this process


@contextlib.contextmanager
def _own_output() -> Iterator[int]:
    """Yield a descriptor of standard output. What the agent prints goes to standard error instead."""
    results = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    yield results


def main() -> None:
    """Import the task file, say that it is ready, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's, which then ends this process
    path = Path(sys.argv[1])
    with _own_output() as results:
        try:
            module = python_file.load(path, "a task file with an agent")
        except UserError as error:
            _write_line(results, {"error": str(error)})
            sys.exit(2)
        warm_up(sys.argv[2])
        _write_line(results, {"ready": True})
        Host(module.agent, path, results).run()
