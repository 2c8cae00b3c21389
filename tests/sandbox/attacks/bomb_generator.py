"""Recurses through generators that each hold another."""


# status: failed, memory, timeout, crashed
def nested(depth):
    yield from nested(depth + 1)


def total(numbers):
    return sum(nested(0))
