"""Answers in the true wire format with numbers that take for ever to build: fractions and integers of megabytes."""

# status: failed, timeout, memory
import json
import os


def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


def total(numbers):
    os.write(3, frame(["returned", [], ["Fraction", "0x" + "7" * 1_900_000, "0x" + "3" * 1_900_000]]))
    return -1
