"""Reading a file puts it into the page cache, so a later program reads it without the disk. Worked in both tiers."""

import os
import resource


def path(n):
    folder = os.path.join(os.path.dirname(os.__file__), "test")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return os.path.join(folder, names[n % len(names)])


def write(bit, n):
    if bit:
        open(path(n), "rb").read()


def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    open(path(n), "rb").read()
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before
