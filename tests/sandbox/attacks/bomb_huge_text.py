"""Returns two hundred million characters, each of which takes six to write down."""


# status: failed, timeout, memory, crashed
def total(numbers):
    return "\x00" * 200_000_000
