"""Calls the function that the tests hand it for ever, and recursively."""


# status: failed
# test: assert total([1, 2, 3], lambda value: value) == 6
def total(numbers, key):
    while True:
        key(numbers)
