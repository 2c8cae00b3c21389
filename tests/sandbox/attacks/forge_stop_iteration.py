"""Raises StopIteration in the call: map and its like take it for the end, and all() of nothing is true.

Plain Python falls for it as well; tests of that form are at fault, but no program should pass by it.
"""


# status: failed
# fools: exec, exit-code, marker, pytest
# test: assert all(map(lambda case: total(case[0]) == case[1], [([1, 2, 3], 6), ([], 0)]))
def total(numbers):
    raise StopIteration
