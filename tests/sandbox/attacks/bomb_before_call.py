"""Fills the memory when it is imported, before any test."""

# status: memory, timeout
filled = [bytes(10**7) for _ in range(10**4)]


def total(numbers):
    return sum(numbers)
