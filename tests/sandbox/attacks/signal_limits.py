"""Lowers the limits of other processes: prlimit on its parent, the victim and the grader."""

# status: failed, blocked
import os
import resource


def total(numbers):
    for pid in (os.getppid(), int("@VICTIM@"), int("@PARENT@"), 1):
        try:
            resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))
            return sum(numbers)
        except OSError:
            pass
    return -1
