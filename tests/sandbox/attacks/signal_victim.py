"""Stops another process of the user, by every call that sends a signal; swallows the refusals."""

# status: blocked, failed
import ctypes
import os
import signal

victim = int("@VICTIM@")
libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    info = ctypes.create_string_buffer(128)
    for call in (
        lambda: libc.syscall(234, victim, victim, signal.SIGSTOP),
        lambda: libc.syscall(200, victim, signal.SIGSTOP),
        lambda: libc.syscall(129, victim, signal.SIGSTOP, info),
        lambda: libc.syscall(297, victim, victim, signal.SIGSTOP, info),
        lambda: libc.syscall(424, os.pidfd_open(victim), signal.SIGSTOP, None, 0),
        lambda: libc.syscall(62, victim, signal.SIGSTOP),
    ):
        try:
            if call() == 0:
                return sum(numbers)
        except OSError:
            pass
    return -1
