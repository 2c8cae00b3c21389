"""The server of the endpoint: uvicorn in an event loop, on the loopback address unless another one is given.

The loop runs in a thread of its own, where uvicorn leaves the signals of the process alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from lora_grpo.errors import UserError

LOOPBACK = "127.0.0.1"
_SECONDS_TO_CLOSE = 2
"""How long open connections have to end when the server closes."""

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the loop. The future is for other threads."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that listens, so that clients can connect before the server answers.

    Args:
        port: 0 takes a free one.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        reason, _, _ = str(error.strerror).partition(" (while")
        raise UserError(f"cannot listen on {host}:{port}: {reason}; pass another --host or --port") from None


def names_of_server(listener: socket.socket) -> list[str]:
    """Return the host names that requests may name: on a loopback address its own ones, else any (`*`).

    With a name of its own that leads to this machine, a web site could read the answers (DNS rebinding).
    """
    address = ipaddress.ip_address(listener.getsockname()[0])
    return ["localhost", LOOPBACK, str(address)] if address.is_loopback else ["*"]


@contextlib.asynccontextmanager
async def serving(app: Any, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve an application inside the block. Yield its address, such as `http://127.0.0.1:43121`.

    Args:
        listener: from `listen`. It is closed at the end. By default, a free port of the loopback address.

    Raises:
        UserError: the address cannot be used.
    """
    import uvicorn

    listener = listener or listen()
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_SECONDS_TO_CLOSE,
    )
    server = uvicorn.Server(config)
    serving_task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving_task.done():
            await asyncio.sleep(0.005)
        if serving_task.done():
            serving_task.result()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving_task
        listener.close()


@contextlib.contextmanager
def serving_in_thread(app: Any, listener: socket.socket) -> Iterator[str]:
    """Serve an application inside the block, in a thread of its own. See `serving`."""
    thread = LoopThread("lora_grpo-endpoint")
    server = serving(app, listener)
    try:
        address = thread.submit(server.__aenter__()).result()
        try:
            yield address
        finally:
            thread.submit(server.__aexit__(None, None, None)).result()
    finally:
        thread.close()
