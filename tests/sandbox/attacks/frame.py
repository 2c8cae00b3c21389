"""Programs that look for the tests in their own process."""

ATTACKS = {
    "caller_constants": r"""
# Reads the number that the caller's next comparison expects out of the caller's code. Fools the same process.
# fools: exec, exit-code, marker, pytest
import dis, sys
def total(numbers):
    caller = sys._getframe(1)
    after = [step for step in dis.get_instructions(caller.f_code) if step.offset > caller.f_lasti]
    for step in after:
        if step.opname == "LOAD_CONST":
            return step.argval
    return -1
""",
    "gc_objects": r"""
# Searches every object the garbage collector knows, and every string they hold, for the tests.
# fools: exec
import gc
before, after = "assert total", "([1, 2, 3])"
def total(numbers):
    for thing in gc.get_objects():
        for part in (thing, *gc.get_referents(thing)):
            text = part.decode("latin-1") if type(part) is bytes else part
            if type(text) is str and after in text.partition(before)[2]:
                return sum(numbers)
    return -1
""",
    "raw_memory": r"""
# Reads the memory around every object it can find, page by page, for the text of the tests (or of earlier programs).
# status: failed, crashed, timeout
import ctypes, gc
before, after = b"assert total", b"([1, 2, 3])"
def total(numbers):
    pages = {id(part) >> 12 for thing in gc.get_objects() for part in (thing, *gc.get_referents(thing))}
    for page in sorted(pages):
        memory = ctypes.string_at(page << 12, 4096)
        if any(part.startswith(after) for part in memory.split(before)[1:]):
            return sum(numbers)
    return -1
""",
    "tests_in_frames": r"""
# Walks up the frames and searches their code, locals and globals for the tests; knows the answer once it sees them.
# fools: exec, exit-code, marker
import sys
needle = "".join(["total", "([1, 2, 3]) ="])
def seen(value, depth=0):
    if depth > 3:
        return False
    if isinstance(value, (str, bytes)):
        return needle in str(value)
    if hasattr(value, "co_consts"):
        return 6 in value.co_consts and "total" in value.co_names
    if isinstance(value, dict):
        return any(seen(part, depth + 1) for part in list(value.values())[:200])
    if isinstance(value, (list, tuple)):
        return any(seen(part, depth + 1) for part in value[:200])
    return False
def total(numbers):
    frame = sys._getframe(1)
    while frame:
        if seen(frame.f_code) or seen(dict(frame.f_locals)) or seen(dict(frame.f_globals)):
            return sum(numbers)
        frame = frame.f_back
    return -1
""",
}
