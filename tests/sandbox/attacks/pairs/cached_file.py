"""Reading a file puts it into the page cache, so that a later program reads it without access to the disk."""

import os
import resource


def path(n):
    folder = os.path.join(os.path.dirname(os.__file__), "test")
    return os.path.join(folder, sorted(name for name in os.listdir(folder) if name.endswith(".py"))[n])


def write(bit, n):
    if bit:
        open(path(n), "rb").read()


def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    open(path(n), "rb").read()
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before
