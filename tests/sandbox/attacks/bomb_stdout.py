"""Prints for ever. Fills the memory of graders that collect the output."""

# status: timeout, failed, memory
import os
import sys


def total(numbers):
    while True:
        print("x" * 1_000_000)
        os.write(1, b"x" * 65536)
        sys.stderr.write("y" * 65536)
