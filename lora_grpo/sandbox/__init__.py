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

verdict.py       `Program`, `Settings`, `Verdict`
pool.py          keeps the workers: `start`, `run`, and `stop`
isolation.py     the isolation tiers, and a self-test that tries to escape
exam.py          compiles the tests once for all candidates
worker.py        one pair of zygotes: submit, wait, kill, decide
launch.py        starts a zygote in an interpreter of its own, directly or in bubblewrap
library.py       collects the standard library into a file in memory
memory_file.py   files in memory

In the interpreters that `launch` starts, with nothing but the standard library and these modules:

zygote.py        the process that forks
lockdown.py      drops access to files, system calls, privileges, and resources
system_calls.py  the tables of allowed system calls, and the filters made of them
importer.py      imports the standard library from memory
adapt.py         lets modules of the library work without files, sockets, and threads
mappings.py      makes forks faster
candidate.py     runs a candidate in a child of its zygote
examiner.py      runs the tests in a child of its zygote
evalplus.py      compares results with those of a reference program
link.py          the tests' end of the socket
codec.py         encodes the values sent over the socket
"""

from lora_grpo.sandbox.lockdown import die_with_parent
from lora_grpo.sandbox.pool import describe, run, start, stop
from lora_grpo.sandbox.verdict import MAX_PROGRAM_SECONDS, BrokenTest, Program, Settings, Verdict
