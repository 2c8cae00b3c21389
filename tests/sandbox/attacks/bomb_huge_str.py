"""Builds a string of a terabyte by one multiplication, and one by formatting."""


# status: memory, timeout
def total(numbers):
    return len("x" * 10**12) or len(f"{numbers[0]:>1000000000000}")
