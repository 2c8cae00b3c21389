"""Answers with exceptions of kinds that end, skip or steer the tests' process: SystemExit, StopIteration, Warning."""

# status: failed, crashed
import json
import os


def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


kinds = ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseExceptionGroup", "object", "exit", "print", "type"]


def total(numbers):
    os.write(3, frame(["raised", [], [kinds[len(numbers)]], "0"]) + frame(["raised", [], kinds, 0]))
    return -1
