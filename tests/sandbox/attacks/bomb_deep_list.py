"""Returns a list nested a hundred thousand deep."""


# status: failed, crashed, memory, timeout
def total(numbers):
    result = []
    for _ in range(100_000):
        result = [result]
    return result
