"""POSIX message queues, semaphores, and shared memory outlive their creator."""

import ctypes

libc = ctypes.CDLL(None, use_errno=True)


def write(bit, n):
    if bit:
        libc.mq_open(b"/pair%d" % n, 0o102, 0o600, None)
        libc.sem_open(b"/pair%d" % n, 0o100, 0o600, 1)
        libc.shm_open(b"/pair%d" % n, 0o102, 0o600)


def read(n):
    name = b"/pair%d" % n
    return libc.mq_open(name, 0) >= 0, bool(libc.sem_open(name, 0)), libc.shm_open(name, 0, 0) >= 0
