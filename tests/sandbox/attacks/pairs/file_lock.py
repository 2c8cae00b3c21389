"""A lock on a file that both can open."""

# live
import fcntl
import os
import time


def write(bit, n):
    if bit:
        fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)
        time.sleep(0.1)


def read(n):
    time.sleep(0.05)
    fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
