"""Signals every process that it may: kill(-1). Sent is the signal 0, which only asks."""

# status: blocked, failed
import os


def total(numbers):
    os.kill(-1, 0)
    return sum(numbers)
