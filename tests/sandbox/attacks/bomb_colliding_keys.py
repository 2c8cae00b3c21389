"""Returns a dict whose keys all have one hash, so that rebuilding it takes for ever."""


# status: failed, timeout, memory
def total(numbers):
    return dict.fromkeys([number * (2**61 - 1) for number in range(1, 60_000)], 6)
