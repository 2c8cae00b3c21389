"""Raises the recursion limit and recurses until the stack is gone."""

# status: crashed, memory, failed
import sys

sys.setrecursionlimit(2**31 - 1)


class Deep:
    def __eq__(self, other):
        return [self] == [other]


def total(numbers):
    return Deep() == Deep()
