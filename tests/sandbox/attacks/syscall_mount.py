"""Mounts, unmounts, binds, changes the root; by the old calls and the new."""

# status: blocked, failed
import ctypes

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    for call in (
        (165, b"none", b"@CANARY@", b"tmpfs", 0, None),
        (165, b"/", b"@CANARY@", None, 4096, None),
        (428, -100, b"/", 1),
        (430, b"tmpfs", 0),
        (161, b"@CANARY@"),
        (155, b".", b"."),
    ):
        if libc.syscall(*call) >= 0:
            return sum(numbers)
    return -1
