"""Asks for userfaultfd, the favourite of those who exploit kernels."""

# status: blocked, failed
import ctypes


def total(numbers):
    return sum(numbers) if ctypes.CDLL(None).syscall(323, 1) >= 0 else -1
