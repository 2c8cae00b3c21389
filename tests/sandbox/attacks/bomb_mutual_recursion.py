"""Calls back into the tests, which call it again: the stacks of both sides grow together."""


# status: failed
# test: def again(numbers):
# test:     return total(numbers, again)
# test: assert total([1, 2, 3], again) == 6
def total(numbers, key):
    return key(numbers)
