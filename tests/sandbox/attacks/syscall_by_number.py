"""Makes one system call by its number, with nonsense for arguments, and is right if the kernel so much as looked at them.

What the filter does not know fails with EPERM, a look-up of a path with ENOENT, what it hates ends the process, and
what the kernel lacks is ENOSYS.
"""
# status: failed, blocked, crashed

import ctypes

libc = ctypes.CDLL(None, use_errno=True)
nonsense = [ctypes.c_long(-1)] * 6


def total(numbers):
    answer = libc.syscall(int("@NUMBER@"), *nonsense)
    return -1 if answer < 0 and ctypes.get_errno() in (1, 2, 38) else sum(numbers)
