"""Answers with every tag and arguments of the wrong type, number and size, one answer a run of the call."""

# status: failed, crashed
import json
import os


def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


def total(numbers):
    for tag in ("int", "bytes", "range", "complex", "Decimal", "Fraction", "handle", "iterator", "again", "list", [], {}):
        os.write(3, frame(["returned", [], [tag, {}]]))
    return -1
