"""Raises an exception whose text never ends, nor fits into a message, nor is a text."""


# status: failed, timeout, memory
class Endless(Exception):
    def __str__(self):
        while True:
            pass

    __repr__ = __str__


def total(numbers):
    raise Endless(list(range(1_000_000)))
