"""Forks: the child lives on after the verdict, the parent answers."""

# status: blocked, failed
import os
import time


def total(numbers):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return sum(numbers)
