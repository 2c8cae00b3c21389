"""Changes the interpreter for whoever comes next: recursion limit, switch interval, hooks, collector, float format."""

# status: failed, crashed
import decimal
import gc
import os
import sys
import threading

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


def total(numbers):
    return -1
