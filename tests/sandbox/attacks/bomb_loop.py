"""Loops for ever."""


# status: timeout
def total(numbers):
    while True:
        pass
