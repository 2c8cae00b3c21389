"""Asks for sizes, times and existence of files it may not open: stat, access, readlink, statfs, getxattr.

Under Landlock alone these calls are not covered; whether they are let through is a matter of the system-call filter.
"""

# status: failed, blocked
# open: landlock
import os

told = []
for ask in (os.stat, os.lstat, os.statvfs, os.readlink, os.listxattr, lambda path: os.access(path, 0) or 1 / 0):
    try:
        told.append(ask("@SECRET_FILE@"))
    except (OSError, ZeroDivisionError):
        pass


def total(numbers):
    return sum(numbers) if told else -1
