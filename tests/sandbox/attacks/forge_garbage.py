"""Writes noise, half a message, broken UTF-8 and NaN to every descriptor, before and in the call."""

# status: failed, crashed, timeout
import os


def babble():
    for descriptor in range(256):
        for text in (b"\x05\x00\x00\x00NaN", b"\x02\x00\x00\x00\xff\xfe", b"[[[[", b"\x00" * 64, b"Infinity\n"):
            try:
                os.write(descriptor, text)
            except OSError:
                break


babble()


def total(numbers):
    babble()
    return -1
