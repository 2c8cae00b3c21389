"""Asks for a terabyte at once."""


# status: memory, timeout
def total(numbers):
    return len(bytes(10**12)) or sum(numbers)
