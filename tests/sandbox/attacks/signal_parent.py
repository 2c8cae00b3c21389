"""Kills its parent process, or at least asks whether it may."""

# status: blocked, failed
import os


def total(numbers):
    os.kill(os.getppid(), 0)
    return sum(numbers)
