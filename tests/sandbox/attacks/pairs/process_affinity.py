"""Whether the other program still runs, by its CPU affinity. Worked under Landlock and bubblewrap."""

# live
import os
import time


def exists(pid):
    try:
        return bool(os.sched_getaffinity(pid))
    except ProcessLookupError:
        return False


def write(bit, n):
    if bit:
        time.sleep(0.15)


def read(n):
    time.sleep(0.05)
    return sum(exists(os.getpid() + step) for step in range(-4, 5) if step) > 2
