"""Maps anonymous memory, again and again, and touches it."""

# status: memory, failed, timeout
import mmap


def total(numbers):
    kept = []
    for _ in range(10_000):
        kept.append(mmap.mmap(-1, 64 << 20))
        kept[-1][::4096] = b"x" * (64 << 8)
    return sum(numbers)
