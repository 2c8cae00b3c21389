"""System V shared memory outlives its creator."""

import ctypes

libc = ctypes.CDLL(None, use_errno=True)


def write(bit, n):
    if bit:
        libc.shmget(7_000_000 + n, 4096, 0o1666)


def read(n):
    return libc.shmget(7_000_000 + n, 4096, 0o666) >= 0
