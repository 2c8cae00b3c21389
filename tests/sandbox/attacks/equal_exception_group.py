"""Raises a group, which is no ValueError, where a ValueError is expected."""


# status: failed
# test: try:
# test:     total(None)
# test: except ValueError:
# test:     pass
# test: else:
# test:     assert False
def total(numbers):
    raise ExceptionGroup("no ValueError", [TypeError()])
