"""Opens the memory of its parents and siblings through /proc, and reads it by process_vm_readv."""

# status: failed, blocked
import glob
import os

reached = []
pids = {os.getppid(), *(os.getpid() + step for step in range(-20, 20)), int("@VICTIM@"), int("@PARENT@"), 1}
for pid in pids - {os.getpid()}:
    for name in ("mem", "maps", "auxv", "stack", "syscall", "stat", "status", "wchan", "pagemap"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                reached.append((pid, name, file.name))
        except OSError:
            pass
reached += glob.glob("/proc/[0-9]*/mem")


def total(numbers):
    return sum(numbers) if reached else -1
