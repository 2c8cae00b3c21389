"""Aborts the process: SIGABRT, without a word."""

# status: crashed, blocked, failed
import os


def total(numbers):
    os.abort()
