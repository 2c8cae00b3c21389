"""Runs bytecode that is no program: the interpreter itself crashes, no ctypes needed."""


# status: crashed, failed, timeout
def total(numbers):
    return -1


total.__code__ = total.__code__.replace(co_code=bytes([100, 255]) * 8, co_stacksize=0)
