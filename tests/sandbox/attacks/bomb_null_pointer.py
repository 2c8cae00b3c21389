"""Writes to address 0: the process dies by SIGSEGV."""

# status: crashed, failed
# fools: none
import ctypes


def total(numbers):
    ctypes.memset(0, 0, 1)
