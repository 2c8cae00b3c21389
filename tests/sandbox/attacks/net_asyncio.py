"""Starts an event loop, which wants a pair of sockets."""

# status: blocked, failed
import asyncio


async def answer(numbers):
    _, writer = await asyncio.open_connection("127.0.0.1", int("@TCP@"))
    writer.write(b"hello")
    return sum(numbers)


def total(numbers):
    return asyncio.run(answer(numbers))
