"""Lists and reads the packages installed beside the standard library of the interpreter itself."""

# status: failed, blocked
import glob
import os

found = []
for folder in ("site-packages", "dist-packages"):
    found += glob.glob(os.path.join(os.path.dirname(os.__file__), folder, "*"))


def total(numbers):
    return sum(numbers) if found else -1
