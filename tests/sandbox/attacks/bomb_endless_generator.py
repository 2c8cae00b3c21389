"""Yields for ever where the tests collect."""


# status: timeout, failed, memory
# test: assert list(total([1, 2, 3])) == [1, 3, 6]
def total(numbers):
    while True:
        yield 0
