"""Runs a shell by os.system."""

# status: blocked, failed
import os


def total(numbers):
    return sum(numbers) if os.system("true") == 0 else -1
