"""Whether the other program still runs, by its CPU affinity. Worked under Landlock in most trials."""

# live
import os
import time


def exists(pid):
    try:
        return bool(os.sched_getaffinity(pid))
    except ProcessLookupError:
        return False


def write(bit, n):
    time.sleep(0.35 if bit else 0.1)


def read(n):
    near = [os.getpid() + step for step in range(-6, 7) if step]
    time.sleep(0.05)
    early = sum(map(exists, near))
    time.sleep(0.15)
    return early > sum(map(exists, near))
