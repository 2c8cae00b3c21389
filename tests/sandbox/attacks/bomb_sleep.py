"""Sleeps for ever, which no CPU limit sees."""

# status: timeout
import time


def total(numbers):
    time.sleep(10**6)
    return sum(numbers)
