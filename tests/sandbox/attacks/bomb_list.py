"""Appends to a list for ever."""


# status: memory, timeout
def total(numbers):
    grown = []
    while True:
        grown.append(" " * 100_000 + str(len(grown)))
