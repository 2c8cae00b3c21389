"""Builds signal frames and handlers of its own in C, to return into the middle of something. Harms itself alone."""

# status: failed, crashed, blocked, timeout
import ctypes
import signal

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    libc.signal(signal.SIGSEGV, ctypes.c_void_p(0x41414141))
    libc.syscall(15)
    return -1
