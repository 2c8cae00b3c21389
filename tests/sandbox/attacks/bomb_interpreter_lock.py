"""Sums a huge range inside one C call, where no signal handler of Python's runs."""


# status: timeout
def total(numbers):
    return sum(range(10**13))
