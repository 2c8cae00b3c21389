"""Swallows MemoryError and goes on asking for memory."""


# status: memory, timeout, failed
def total(numbers):
    kept = []
    while True:
        try:
            kept.append(bytearray(10**7))
        except MemoryError:
            continue
