"""Loops in a finaliser, when its objects are thrown away at the end."""


# status: failed, timeout
class Loops:
    def __del__(self):
        while True:
            pass


keep = Loops()


def total(numbers):
    return -1
