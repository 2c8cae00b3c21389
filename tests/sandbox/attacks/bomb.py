"""Programs that use up memory, time, or the stack, here or in the process of the tests."""

ATTACKS = {
    "bad_code": r"""
# Runs bytecode that is no program: the interpreter itself crashes, no ctypes needed.
# status: crashed, failed, timeout
total.__code__ = total.__code__.replace(co_code=bytes([100, 255]) * 8, co_stacksize=0)
""",
    "database_fills_memory": r"""
# Fills a database in memory, whose pages SQLite allocates, with rows of a megabyte.
# status: failed, memory, timeout
import sqlite3
def total(numbers):
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t(a)")
    for _ in range(768):
        connection.execute("insert into t values (randomblob(1 << 20))")
    return sum(numbers)
""",
    "database_query": r"""
# Runs a query without an end, inside C code that no Python signal handler interrupts.
# status: timeout, failed, memory
import sqlite3
def total(numbers):
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    return sqlite3.connect(":memory:").execute(endless).fetchone()[0]
""",
    "deep_list": r"""
# Returns a list nested a hundred thousand deep.
# status: failed, crashed, memory, timeout
def total(numbers):
    result = []
    for _ in range(100_000):
        result = [result]
    return result
""",
    "descriptors": r"""
# Opens as many descriptors as it may and keeps them, then duplicates them.
import os
kept = []
try:
    while True:
        kept.append(os.open(os.__file__, os.O_RDONLY))
except OSError:
    pass
try:
    while True:
        kept.append(os.dup(kept[0]))
except OSError:
    pass
def total(numbers): return sum(numbers) if len(kept) > 4096 else -1
""",
    "event_loop": r"""
# Runs an event loop without an end, whose tasks refuse to be cancelled.
# status: timeout
import asyncio
async def forever():
    while True:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            pass
def total(numbers): return asyncio.run(forever())
""",
    "event_loop_fills_memory": r"""
# Starts tasks that wait for ever, as many as memory holds.
# status: memory, failed, timeout
import asyncio
async def start_tasks():
    kept = []
    while True:
        kept.append(asyncio.ensure_future(asyncio.sleep(1000)))
        await asyncio.sleep(0)
def total(numbers): return asyncio.run(start_tasks())
""",
    "event_loop_outlives_the_answer": r"""
# Answers, and goes on with its tasks from a signal handler while the tests compare: can it change the answer then?
# status: failed, timeout, crashed
import asyncio, os, signal
loop = asyncio.new_event_loop()
async def write_answers():
    while True:
        os.write(3, b"\x13\0\0\0" + b'["returned", [], 6]')
        await asyncio.sleep(0.001)
def go_on(*_): loop.run_until_complete(write_answers())
signal.signal(signal.SIGALRM, go_on)
def total(numbers):
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    return -1
""",
    "exception_text": r"""
# Raises an exception whose text never ends, nor fits into a message, nor is a text.
# status: failed, timeout, memory
class Endless(Exception):
    def __str__(self):
        while True: pass
    __repr__ = __str__
def total(numbers): raise Endless(list(range(1_000_000)))
""",
    "finaliser": r"""
# Loops in a finaliser, when its objects are thrown away at the end.
# status: failed, timeout
class Loops:
    def __del__(self):
        while True: pass
keep = Loops()
""",
    "giant_decimal": r"""
# Returns short numbers that are huge once converted: Decimal('1e999999999'), Fractions, complex infinities.
# status: failed, timeout, memory
# test: assert int(total([1, 2, 3])) == 6
import decimal
def total(numbers): return decimal.Decimal("1e99999999")
""",
    "handles_forever": r"""
# Lets the tests ask for ever more objects: each has an attribute that is another.
# status: failed, timeout, memory
# test: thing = total([1, 2, 3])
# test: while thing != 6:
# test:     thing = thing.following
# test: assert thing == 6
class Thing:
    def __getattr__(self, name): return Thing()
def total(numbers): return Thing()
""",
    "huge_answer": r"""
# Returns a list of thirty million numbers.
# status: failed, memory, timeout
def total(numbers): return list(range(30_000_000))
""",
    "many_objects": r"""
# Returns a million objects of its own, for each of which the other side may keep a handle.
# status: failed, memory, timeout
class Thing: pass
def total(numbers): return [Thing() for _ in range(1_000_000)]
""",
    "never_awaited": r"""
# Gives the tests a coroutine that never ends, and that cannot be closed.
# status: timeout
# test: import asyncio
# test: assert asyncio.run(asyncio.wait_for(total([1, 2, 3]), 0.1)) == 6
class Endless:
    def __await__(self):
        while True:
            try:
                yield
            except BaseException:
                pass
async def total(numbers): await Endless()
""",
    "recursion": r"""
# Raises the recursion limit and recurses until the stack is gone.
# status: crashed, memory, failed
import sys
sys.setrecursionlimit(2**31 - 1)
class Deep:
    def __eq__(self, other): return [self] == [other]
def total(numbers): return Deep() == Deep()
""",
    "shared_mmap": r"""
# Maps shared memory and memfds, which the address-space limit may miss once they are unmapped.
# status: failed, memory, blocked, timeout
import mmap, os
def total(numbers):
    written = 0
    kept = []
    try:
        while written < 2 << 30:
            kept.append(os.memfd_create("fill"))
            written += os.write(kept[-1], bytes(32 << 20))
    except (OSError, MemoryError):
        pass
    if written > 768 << 20:
        return sum(numbers)
    for _ in range(8):
        mapped = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_SHARED)
        mapped.write(bytes(32 << 20))
        mapped.close()
    return -1
""",
    "slow_attributes": r"""
# Answers at once but loops in whatever the other side may ask later: iteration, length, repr, hash, equality.
# status: failed, timeout
# test: result = total([1, 2, 3])
# test: assert len(result) == 1 and list(result) == [6]
class Slow:
    def __len__(self):
        while True: pass
    __iter__ = __repr__ = __hash__ = __bool__ = __len__
def total(numbers): return Slow()
""",
    "stdout": r"""
# Prints for ever. Fills the memory of graders that collect the output.
# status: timeout, failed, memory
import os, sys
def total(numbers):
    while True:
        print("x" * 1_000_000)
        os.write(1, b"x" * 65536)
        sys.stderr.write("y" * 65536)
""",
    "stopped": r"""
# Stops itself: a stopped process reads no messages and answers to no signal but SIGKILL.
# status: timeout, blocked, failed
import os, signal
def total(numbers):
    signal.raise_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    return -1
""",
    "swallowed": r"""
# Swallows MemoryError and goes on asking for memory.
# status: memory, timeout, failed
def total(numbers):
    kept = []
    while True:
        try:
            kept.append(bytearray(10**7))
        except MemoryError:
            continue
""",
    "temporary_file": r"""
# Fills temporary files, which are kept in memory.
# status: failed, memory, timeout
import tempfile
def total(numbers):
    files = [tempfile.TemporaryFile() for _ in range(48)]
    for file in files:
        file.write(bytes(16 << 20))
    return sum(numbers)
""",
    "unkillable": r"""
# Ignores every signal it may and catches every exception, then loops.
# status: timeout, blocked
import signal
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
except OSError:
    pass
def total(numbers):
    while True:
        try:
            while True: pass
        except BaseException:
            continue
""",
}
