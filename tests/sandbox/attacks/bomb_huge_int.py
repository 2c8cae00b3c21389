"""Computes a number of a hundred million digits, in one step that holds the interpreter lock."""


# status: timeout, memory
def total(numbers):
    return 10**10**8 % 7
