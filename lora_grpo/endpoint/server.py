"""The server of the endpoint: uvicorn in an event loop, on the loopback address unless another one is given.

The loop runs in a thread of its own, where uvicorn leaves the signals of the process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from lora_grpo.errors import UserError

LOOPBACK = "127.0.0.1"
_SECONDS_TO_CLOSE = 2
"""How long open connections have to end when the server closes."""


@contextlib.asynccontextmanager
async def serving(app: Any, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve an application inside the block. Yield its address, such as `http://127.0.0.1:43121`.

    Args:
        port: 0 takes a free one.

    Raises:
        UserError: the address cannot be used.
    """
    import uvicorn

    try:
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --host or --port") from None
    bound_port = listener.getsockname()[1]
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
        yield f"http://{host}:{bound_port}"
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving_task
        listener.close()
