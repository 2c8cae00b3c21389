"""Wait for `async` functions of users: rewards, graders and methods of environments."""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def finished(returned: Any) -> Any:
    """Return what a function returned or, if that is an awaitable, wait for its result."""
    if not inspect.isawaitable(returned):
        return returned
    return _in_event_loop(returned)


def finished_together(returned: Sequence[Any]) -> list[Any]:
    """Return what N functions returned. Those that are awaitables run at the same time.

    An awaitable that raises has its exception as its result, so that the others are not interrupted.
    """
    results = list(returned)
    awaited = [index for index, value in enumerate(returned) if inspect.isawaitable(value)]
    if not awaited:
        return results

    async def run_all() -> list[Any]:
        return await asyncio.gather(*(returned[index] for index in awaited), return_exceptions=True)

    for index, result in zip(awaited, _in_event_loop(run_all()), strict=True):
        results[index] = result
    return results


def _in_event_loop(awaitable: Awaitable[Any]) -> Any:
    """Run an awaitable to its end, in this thread.

    All calls of a thread share one event loop, unlike those of `asyncio.run`: a client or a connection that a function
    keeps between calls belongs to the loop in which it was opened.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(awaitable)
    # In a notebook, this thread runs the notebook's loop, in which nothing can be awaited from here.
    return _other_thread().submit(_run, awaitable).result()


def _run(awaitable: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await awaitable

    loop = _event_loop(os.getpid(), threading.get_ident())
    task = loop.create_task(wait())
    try:
        return loop.run_until_complete(task)
    except BaseException:
        task.cancel()  # if a time limit or Ctrl-C interrupted the loop, the task would go on with the next call
        raise


def close() -> None:
    """Close the event loops, and end the thread that waits beside a notebook's loop. The next call makes others."""
    for loop in _loops:
        if not loop.is_running():
            loop.close()
    _loops.clear()
    _event_loop.cache_clear()
    if _other_thread.cache_info().currsize:
        _other_thread().shutdown()
        _other_thread.cache_clear()


_loops: list[asyncio.AbstractEventLoop] = []


@functools.cache
def _event_loop(process: int, thread: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a thread. A forked process does not use that of its parent."""
    loop = asyncio.new_event_loop()
    _loops.append(loop)
    return loop


@functools.cache
def _other_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="lora_grpo-async")
