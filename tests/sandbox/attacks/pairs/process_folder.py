"""Whether the other program still runs, by `stat` of its folder in /proc. Worked under Landlock in most trials."""

# live
import os
import time


def exists(pid):
    return os.path.exists(f"/proc/{pid}")


def write(bit, n):
    time.sleep(0.35 if bit else 0.1)


def read(n):
    near = [os.getpid() + step for step in range(-6, 7) if step]
    time.sleep(0.05)
    early = sum(map(exists, near))
    time.sleep(0.15)
    return early > sum(map(exists, near))
