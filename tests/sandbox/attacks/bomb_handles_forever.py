"""Lets the tests ask for ever more objects: each has an attribute that is another."""


# status: failed, timeout, memory
# test: thing = total([1, 2, 3])
# test: while thing != 6:
# test:     thing = thing.following
# test: assert thing == 6
class Thing:
    def __getattr__(self, name):
        return Thing()


def total(numbers):
    return Thing()
