"""Opens a secret by raw system calls: open, openat, openat2, creat, and their relatives."""

# status: failed, blocked
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
path = b"@SECRET_FILE@"
how = (ctypes.c_uint64 * 3)(0, 0, 0)
calls = [(2, path, 0, 0), (257, -100, path, 0, 0), (437, -100, path, ctypes.byref(how), 24), (428, -100, path, 0)]


def total(numbers):
    for call in calls:
        descriptor = libc.syscall(*call)
        if descriptor >= 0:
            return sum(numbers)
    return -1
