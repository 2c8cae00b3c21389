"""Answers so that the tests' own process fails in ways that look like a broken data set: imports, syntax, no call at all."""

# status: failed, crashed
import json
import os


def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


os.write(3, frame(["raised", [], ["ImportError"], "No module named 'tests'"]))


def total(numbers):
    raise ImportError("No module named 'numpy'")
