"""Run model-written programs against their tests: isolated, and many per second.

    print(sandbox.start(Settings()))              # chooses and tests the isolation
    verdicts = sandbox.run([Program(source, test, functions=("f",)), ...])

A worker is a pair of bare interpreters. One forks a process for each candidate, the other for its tests:

    pool ── programs ──► worker ─┬─► zygote of candidates ── fork ──► candidate.py   the source, and nothing else
                                 │                                        ▲ │ plain values over a socket (codec.py)
                                 │                                        │ ▼
                                 └─► zygote of tests ─────── fork ──► examiner.py    the real tests ──► the verdict

The candidate never has access to the process that decides the verdict or to the pipe that carries it. Without a
verdict the program fails.

verdict.py     `Program`, `Settings`, `Verdict`
pool.py        the workers of this process, `start`, `run` and `stop`
exam.py        compiles tests once for all candidates
worker.py      one pair of zygotes: submit, wait, kill, decide
launch.py      starts an interpreter, bare or in bubblewrap
isolation.py   which isolation works on this machine
zygote.py      the process that forks; candidate.py and examiner.py run in its children
link.py        the tests' end of the socket; codec.py encodes the values on it
lockdown.py    drops files, system calls and privileges; syscalls.py lists the system calls
"""

from lora_grpo.sandbox.exam import prepare
from lora_grpo.sandbox.pool import check_settings, describe, run, start, stop
from lora_grpo.sandbox.verdict import BrokenTest, Program, Settings, Verdict

__all__ = [
    "BrokenTest",
    "Program",
    "Settings",
    "Verdict",
    "check_settings",
    "describe",
    "prepare",
    "run",
    "start",
    "stop",
]
