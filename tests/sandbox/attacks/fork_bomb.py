"""Forks as fast as it can (a hundred times, in case it may)."""

# status: blocked, failed
import os
import time


def total(numbers):
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    return sum(numbers)
