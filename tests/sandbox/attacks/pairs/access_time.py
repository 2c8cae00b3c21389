"""Reading a file sets its access time, which `stat` returns. Worked under Landlock."""

import os
import time


def path(n):
    folder = os.path.join(os.path.dirname(os.__file__), "test")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return os.path.join(folder, names[n % len(names)])


def write(bit, n):
    if bit:
        open(path(n), "rb").read(1)


def read(n):
    return time.time() - os.stat(path(n)).st_atime < 60
