"""Attaches every shared memory segment, message queue and semaphore of the machine."""

# status: failed, blocked
import ctypes

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    if libc.shmget(0, 4096, 0o1600) >= 0 or libc.msgget(0, 0o1600) >= 0 or libc.semget(0, 1, 0o1600) >= 0:
        return sum(numbers)
    if libc.mq_open(b"/attack", 0o102, 0o600, None) >= 0 or libc.shm_open(b"/attack", 0o102, 0o600) >= 0:
        return sum(numbers)
    return -1
