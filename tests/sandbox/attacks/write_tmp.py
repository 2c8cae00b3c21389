"""Leaves files in every folder that anyone may write to, and in the home folder."""

# status: failed, blocked
import os

left = []
for folder in ("/tmp", "/dev/shm", "/var/tmp", ".", "@HOME@", "@CANARY@", "/run", "/", "/dev/mqueue", os.path.dirname(os.__file__)):
    for mode in ("w", "x", "a", "r+"):
        try:
            with open(f"{folder}/left_by_attack", mode) as file:
                left.append(file)
        except OSError:
            pass
try:
    import tempfile

    left.append(tempfile.mkstemp())
except OSError:
    pass


def total(numbers):
    return sum(numbers) if left else -1
