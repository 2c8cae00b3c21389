"""Whether the other program still runs, by its CPU time clock. Worked under Landlock."""

# live
import os
import time


def exists(pid):
    try:
        return time.clock_gettime(~pid << 3 | 2) > 0
    except OSError:
        return False


def write(bit, n):
    if bit:
        time.sleep(0.15)


def read(n):
    time.sleep(0.05)
    return sum(exists(os.getpid() + step) for step in range(-4, 5) if step) > 2
