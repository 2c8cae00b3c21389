"""Raises an exception whose chain of causes is a ring, with notes that are no texts."""


# status: failed, timeout
def total(numbers):
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    first.__context__, second.__context__ = second, first
    first.__notes__ = [object(), None, b"\xff"] * 1000
    raise first
