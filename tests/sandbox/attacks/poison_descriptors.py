"""Changes what it shares with its parent through open descriptors: position, flags, blocking, close-on-exec."""

# status: failed, crashed, blocked, timeout
import fcntl
import os

for descriptor in range(256):
    for attempt in (
        lambda descriptor: os.set_blocking(descriptor, False),
        lambda descriptor: os.lseek(descriptor, 10, os.SEEK_SET),
        lambda descriptor: os.set_inheritable(descriptor, True),
        lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND | os.O_ASYNC),
        lambda descriptor: os.ftruncate(descriptor, 0),
    ):
        try:
            attempt(descriptor)
        except OSError:
            pass


def total(numbers):
    return -1
