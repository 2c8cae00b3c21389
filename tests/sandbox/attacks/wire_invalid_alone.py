"""Sends the message for an invalid program with nothing in it, to trip the reader before any test has asked anything."""

# status: failed, invalid, crashed
import os

os.write(3, (11).to_bytes(4, "little") + b'["invalid"]')


def total(numbers):
    return -1
