"""Asks for sizes, times and existence of files it may not open: stat, access, readlink, statfs, getxattr.

Passed under Landlock, which does not cover these calls, until the filter denied them.
"""

# status: failed, blocked
import os

told = []
for ask in (os.stat, os.lstat, os.statvfs, os.readlink, os.listxattr, lambda path: os.access(path, 0) or 1 / 0):
    try:
        told.append(ask("@SECRET_FILE@"))
    except (OSError, ZeroDivisionError):
        pass


def total(numbers):
    return sum(numbers) if told else -1
