"""All programs share /dev/null, whose times and offset `fstat` and `lseek` return."""

import os


def write(bit, n):
    if bit:
        os.lseek(0, 1000, os.SEEK_SET)
        os.utime(0, (n, n))


def read(n):
    return os.lseek(0, 0, os.SEEK_CUR), os.fstat(0).st_mtime
