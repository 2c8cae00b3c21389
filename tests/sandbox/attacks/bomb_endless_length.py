"""Returns ranges and repeats that are short to write and endless to unpack."""

# status: failed, timeout, memory
# test: assert list(total([1, 2, 3])) == [6]
import itertools


def total(numbers):
    return range(10**15) if len(numbers) % 2 else itertools.repeat(0)
