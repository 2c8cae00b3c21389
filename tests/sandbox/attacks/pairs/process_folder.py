"""Whether the other program still runs, by `stat` of its folder in /proc. Worked under Landlock."""

# live
import os
import time


def exists(pid):
    return os.path.exists(f"/proc/{pid}")


def write(bit, n):
    if bit:
        time.sleep(0.15)


def read(n):
    time.sleep(0.05)
    return sum(exists(os.getpid() + step) for step in range(-4, 5) if step) > 2
