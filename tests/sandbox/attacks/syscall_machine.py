"""Asks for what concerns the whole machine, with arguments that would change nothing: names, clocks, modules, swap."""

# status: blocked, failed
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
calls = [(170, os.uname().nodename.encode(), len(os.uname().nodename)), (159, bytes(256)), (163, None), (103, 10, 0, 0)]
calls += [(172, 0), (173, 0, 1, 0), (154, 0, bytes(16), 16), (135, 0xFFFFFFFF), (153,), (143, 0, bytes(8)), (300, 0, 0)]


def total(numbers):
    for call in calls:
        if libc.syscall(*call) >= 0:
            return sum(numbers)
    return -1
