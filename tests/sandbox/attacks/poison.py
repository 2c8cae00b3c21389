"""Programs that change their process for the next ones, or look for what earlier ones left."""

ATTACKS = {
    "interpreter": r"""
# Changes the interpreter for whoever comes next: recursion limit, switch interval, hooks, collector, float format.
import decimal, gc, os, sys, threading
sys.setswitchinterval(1000)
sys.set_int_max_str_digits(0)
gc.disable()
gc.set_threshold(1)
decimal.getcontext().prec = 1
os.environ["POISONED"] = "1"
os.umask(0o777) if hasattr(os, "umask") else None
threading.stack_size(1 << 20)
sys.addaudithook(lambda *_: None)
sys.setrecursionlimit(60)
""",
    "leftovers": r"""
# Looks for what programs before it left in this process: names, modules, files, environment, text of tests.
import builtins, gc, math, os
halves = [("left", "over"), ("poi", "soned")]
def total(numbers):
    texts = {part for thing in gc.get_objects() for part in gc.get_referents(thing) if type(part) is str}
    for text in texts:
        if any(text.partition(first)[2].startswith(second) for first, second in halves):
            return sum(numbers)
    return sum(numbers) if vars(builtins).keys() & {"kept"} or hasattr(math, "kept") or os.environ else -1
""",
    "memory": r"""
# Overwrites small integers, constants and code objects in its memory, as if the next program shared them.
# status: failed, crashed, timeout
import ctypes
def total(numbers):
    ctypes.memmove(id(6) + 24, id(7) + 24, 4)
    return 7
""",
    "modules": r"""
# Changes modules for whoever comes next: math, json, builtins, random's seed, sys.path.
import builtins, json, math, random, sys
builtins.poisoned = math.poisoned = json.poisoned = True
builtins.sum = builtins.len = builtins.range = math.isclose = json.loads = lambda *_, **__: 0
random.seed(1)
sys.path[:] = ["/tmp"]
sys.modules["re"] = sys.modules["collections"] = None
""",
    "signals": r"""
# Leaves handlers, masks, alarms and pending signals behind for whoever comes next.
import signal
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.set_wakeup_fd(-1)
""",
}
