"""Changes priority, scheduler and cores of other processes."""

# status: failed, blocked
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def total(numbers):
    for pid in (os.getppid(), int("@VICTIM@"), int("@PARENT@")):
        for attempt in (
            lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
            lambda pid: os.setpriority(os.PRIO_USER, 0, 19),
            lambda pid: os.sched_setaffinity(pid, {0}),
            lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
            lambda pid: libc.syscall(251, 1, pid, 0) == 0 or os.open("/nothing", 0),
        ):
            try:
                attempt(pid)
                return sum(numbers)
            except OSError:
                pass
    return -1
