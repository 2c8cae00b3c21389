"""The working folder and the file mode mask."""

import os


def write(bit, n):
    for change in (lambda: os.chdir("/usr" if bit else "/"), lambda: os.umask(bit)):
        try:
            change()
        except OSError:
            pass


def read(n):
    return os.getcwd(), os.path.abspath("a")
