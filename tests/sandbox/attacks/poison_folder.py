"""Changes the working directory and the root for whoever comes next."""

# status: failed, blocked
import os

for folder in ("/", "/tmp", os.path.dirname(os.__file__)):
    try:
        os.chdir(folder)
        os.chroot(folder)
    except OSError:
        pass


def total(numbers):
    return -1
