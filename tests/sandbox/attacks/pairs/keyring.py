"""Keys in the user's keyring outlive their creator."""

import ctypes

libc = ctypes.CDLL(None, use_errno=True)


def write(bit, n):
    if bit:
        libc.syscall(248, b"user", b"pair%d" % n, b"1", 1, -4)


def read(n):
    return libc.syscall(249, b"user", b"pair%d" % n, None, -4) >= 0
