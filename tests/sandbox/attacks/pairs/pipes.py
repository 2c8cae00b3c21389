"""The kernel limits the memory of all pipes of a user."""

# live
import os
import time


def write(bit, n):
    held = [os.pipe() for _ in range(14 * bit)]
    time.sleep(0.1)
    return len(held)


def read(n):
    time.sleep(0.05)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return os.write(writer, bytes(1 << 20))
