"""Returns a million objects of its own, for each of which the other side may keep a handle."""


# status: failed, memory, timeout
class Thing:
    pass


def total(numbers):
    return [Thing() for _ in range(1_000_000)]
