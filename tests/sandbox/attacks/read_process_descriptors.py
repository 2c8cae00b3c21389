"""Opens other processes' descriptors through /proc/<pid>/fd: their result pipes, their test files."""

# status: failed, blocked
import os

reached = []
pids = {os.getppid(), *(os.getpid() + step for step in range(-20, 20)), int("@VICTIM@"), int("@PARENT@")}
for pid in pids - {os.getpid()}:
    for descriptor in range(64):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                reached.append(os.open(f"/proc/{pid}/fd/{descriptor}", flags | os.O_NONBLOCK))
            except OSError:
                pass
    for name in ("fd", "cwd", "root", "exe", "task"):
        try:
            reached.append(os.listdir(f"/proc/{pid}/{name}"))
        except OSError:
            pass


def total(numbers):
    for descriptor in reached:
        if isinstance(descriptor, int):
            try:
                os.write(descriptor, b'"passed"\n')
            except OSError:
                pass
    return sum(numbers) if reached else -1
