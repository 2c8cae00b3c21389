"""Raises where no exception is expected, and lies in `__eq__` of the exception and its cause."""
# status: failed


class Agreeable(Exception):
    __eq__ = __bool__ = lambda *_: True
    __hash__ = lambda _: 0
    __cause__ = property(lambda self: self)
    __context__ = __traceback__ = property(lambda self: None)


def total(numbers):
    raise Agreeable(Agreeable(), Agreeable())
