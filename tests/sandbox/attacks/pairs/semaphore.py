"""System V semaphores and message queues outlive their creator."""

import ctypes

libc = ctypes.CDLL(None, use_errno=True)


def write(bit, n):
    if bit:
        libc.semget(7_000_000 + n, 1, 0o1666)
        libc.msgget(7_000_000 + n, 0o1666)


def read(n):
    return libc.semget(7_000_000 + n, 1, 0o666) >= 0, libc.msgget(7_000_000 + n, 0o666) >= 0
