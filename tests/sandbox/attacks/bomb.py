"""Programs that use up memory, time, or the stack, here or in the process of the tests."""

ATTACKS = {
    "bad_code": r"""
# Runs bytecode that is no program: the interpreter itself crashes, no ctypes needed.
# status: crashed, failed, timeout
total.__code__ = total.__code__.replace(co_code=bytes([100, 255]) * 8, co_stacksize=0)
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
