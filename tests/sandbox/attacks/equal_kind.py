"""Returns an object without any abilities, where the tests want a function, an iterator, or a container. It used to be
callable, an iterator, and sized, because every handle was."""
# status: failed
# test: import collections.abc as abc
# test: result = total([1, 2, 3])
# test: assert callable(result) or isinstance(result, (abc.Iterator, abc.Sized)) or hasattr(result, "__getitem__")


def total(numbers):
    return object()
