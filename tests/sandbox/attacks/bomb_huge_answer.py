"""Returns a list of thirty million numbers."""


# status: failed, memory, timeout
def total(numbers):
    return list(range(30_000_000))
