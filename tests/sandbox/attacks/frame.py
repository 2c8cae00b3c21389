"""Programs that look for the tests in their own process."""

ATTACKS = {
    "callback_frames": r"""
# Looks at the frames from inside a function that it passes out, or gets, while the tests wait. Fools same process.
# fools: exec, exit-code, marker
# test: assert total([1, 2, 3], lambda value: value) == 6
import sys
def total(numbers, key):
    frame = sys._getframe(1)
    while frame:
        if 6 in frame.f_code.co_consts:
            return 6
        frame = frame.f_back
    code = getattr(key, "__code__", None)
    return sum(numbers) if code is not None and "tests" in code.co_filename else -1
""",
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
    "modules_of_runner": r"""
# Looks through every module that is not of the standard library for program, test, prelude and verdict objects.
# status: failed, timeout
import sys
before, after = "assert total", "([1, 2, 3])"
def total(numbers):
    for name, module in list(sys.modules.items()):
        for value in list(getattr(module, "__dict__", {}).values()):
            known = name.split(".")[0] in sys.stdlib_module_names
            if not known and after in repr(value)[:100_000].partition(before)[2]:
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
    "tracebacks": r"""
# Raises and catches to collect tracebacks, threads' frames and inspect.stack, and searches them for the tests.
# fools: exec, exit-code, marker
import inspect, sys, traceback
needle = "".join(["assert ", "total"])
def total(numbers):
    try:
        raise ValueError
    except ValueError as error:
        text = "".join(traceback.format_exception(error)) + "".join(traceback.format_stack())
    frames = [info.frame for info in inspect.stack()[1:]] + list(sys._current_frames().values())
    for frame in frames:
        text += repr(frame.f_code.co_consts) + "".join(map(str, list(frame.f_locals.values())[:50]))
    return sum(numbers) if needle in text or any(needle in str(f.f_locals) for f in frames) else -1
""",
}
