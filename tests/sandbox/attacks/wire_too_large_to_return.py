"""Answers with a text that takes two bytes a letter on its way in and six on its way back, more than a message may have."""
# status: failed, crashed, memory, timeout
# functions: total, wrap
# test: assert total(wrap([1, 2, 3])) == 6

import os


def wrap(numbers):
    body = '["returned",[],"'.encode() + "é".encode() * 12_000_000 + b'"]'
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(3, frame) :]
    return -1


def total(numbers):
    return -1
