"""Runs programs that a model wrote and says whether they pass their tests: safely, and many a second.

    print(sandbox.start(Settings()))              # tries the isolation; the first `run` does it otherwise
    verdicts = sandbox.run([Program(source, test, functions=("f",)), ...])

A worker is a pair of bare interpreters. One forks a process for each candidate, the other a process for its tests:

    pool ── programs ──► worker ─┬─► zygote of candidates ── fork ──► candidate.py   the source, and nothing else
                                 │                                        ▲ │ plain values over a socket (codec.py)
                                 │                                        │ ▼
                                 └─► zygote of tests ─────── fork ──► examiner.py    the real tests ──► the verdict

The verdict is made where the candidate never was, and comes on a pipe it never had. No verdict is a fail.

verdict.py     what goes in and what comes out
pool.py        the workers of this process, `start`, `run` and `stop`
exam.py        tests, compiled once for all candidates
worker.py      one pair of zygotes: hand over, wait, kill, decide
launch.py      how an interpreter is started, bare or in bubblewrap
isolation.py   which isolation holds here
zygote.py      the process that forks; candidate.py and examiner.py are its two kinds of children
link.py        the tests' end of the socket; codec.py is values on the wire
lockdown.py    what a process gives up; syscalls.py is its list of system calls
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
