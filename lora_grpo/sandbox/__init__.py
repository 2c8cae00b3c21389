"""Run model-written programs against tests, in isolation and at a high rate.

    print(sandbox.start(Settings()))              # selects and tests the isolation
    verdicts = sandbox.run([Program(source, test, functions=("f",)), ...])

A worker is a pair of fork servers (zygotes), which import only the standard library. One forks a process for each
candidate, and the other for its tests:

    pool ── programs ──► worker ─┬─► zygote of candidates ── fork ──► candidate.py   only the candidate's source
                                 │                                        ▲ │ plain values over a socket (codec.py)
                                 │                                        │ ▼
                                 └─► zygote of tests ─────── fork ──► examiner.py    the real tests ──► the verdict

The candidate has no access to the process that decides the verdict or to the pipe that carries it. A program without a
verdict fails.

verdict.py     `Program`, `Settings`, `Verdict`
pool.py        finds an isolation that works, and keeps the workers; `start`, `run`, and `stop`
exam.py        compiles the tests once for all candidates
worker.py      one pair of zygotes: submit, wait, kill, decide
launch.py      starts an interpreter, directly or in bubblewrap, with the standard library in memory
zygote.py      the process that forks; it imports the library from memory
adapt.py       lets modules of the library work without files, sockets, and threads
mappings.py    makes forks faster
candidate.py   runs a candidate in a child of its zygote
examiner.py    runs the tests in a child of its zygote
evalplus.py    compares results with those of a reference program
link.py        the tests' end of the socket
codec.py       encodes the values sent over the socket
lockdown.py    drops access to files, system calls, and privileges; lists the allowed system calls
"""

from lora_grpo.sandbox import codec, launch
from lora_grpo.sandbox.exam import prepare
from lora_grpo.sandbox.lockdown import die_with_parent
from lora_grpo.sandbox.pool import describe, run, start, stop
from lora_grpo.sandbox.verdict import LONGEST, BrokenTest, Program, Settings, Verdict
