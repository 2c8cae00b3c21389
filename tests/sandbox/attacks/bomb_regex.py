"""Matches a pattern that backtracks for ever, inside one C call."""

# status: timeout
import re


def total(numbers):
    return len(re.match(r"(a+)+$", "a" * 64 + "b") or ())
