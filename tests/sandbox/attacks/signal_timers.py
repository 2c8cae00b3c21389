"""Leaves timers that go off later, at itself or at a thread of another process: alarm, setitimer, timer_create."""

# status: failed, crashed, blocked, timeout
import ctypes
import signal
import struct

libc = ctypes.CDLL(None, use_errno=True)
signal.alarm(1)
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.01)
signal.setitimer(signal.ITIMER_PROF, 0.3, 0.01)


def total(numbers):
    event = struct.pack("QiiI", 0, signal.SIGSTOP, 4, int("@VICTIM@")).ljust(64, b"\0")
    timer = ctypes.c_int()
    return sum(numbers) if libc.syscall(222, 1, event, ctypes.byref(timer)) == 0 else -1
