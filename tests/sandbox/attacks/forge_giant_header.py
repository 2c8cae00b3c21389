"""Announces messages of 4 GiB and of 2^63 bytes on every descriptor. Makes careless readers allocate or wait forever."""

# status: failed, crashed, timeout, memory
import os

for descriptor in range(256):
    try:
        os.write(descriptor, b"\xff\xff\xff\xff" + b"\xff\xff\xff\x7f" * 3)
    except OSError:
        pass


def total(numbers):
    return -1
