"""Answers with a list of more items than a call may have, for the tests to pass back."""
# status: failed, crashed, memory, timeout
# functions: total, wrap
# test: assert total(wrap([1, 2, 3])) == 6

import os


def wrap(numbers):
    body = b'["returned",[],["list",[' + b'["list",[]],' * 1_200_000 + b"0]]]"
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(3, frame) :]
    return -1


def total(numbers):
    return -1
