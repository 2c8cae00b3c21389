"""Uses class, attribute and exception names of ten million characters."""


# status: failed, timeout, memory, crashed
def total(numbers):
    raise type("N" * 10_000_000, (Exception,), {"__str__": lambda self: "s" * 50_000_000})
