"""Pairs of programs: see `test_pairs.py`."""

STILL_RUNS = """
def write(bit, n):
    time.sleep(0.35 if bit else 0.1)
def read(n):
    near = [os.getpid() + step for step in range(-6, 7) if step]
    time.sleep(0.05)
    early = sum(map(exists, near))
    time.sleep(0.15)
    return early > sum(map(exists, near))
"""
"""The rest of a pair that defines only `exists`: whether a process with an id near its own ends early."""

PAIRS = {
    "absent_name": r"""
# Looking up a name that does not exist makes the next look-up faster. Worked under Landlock.
# noisy
import os, time
FOLDER = os.path.dirname(os.__file__)
def seconds(name):
    started = time.perf_counter()
    os.path.exists(name)
    return time.perf_counter() - started
def write(bit, n):
    for _ in range(3):
        os.path.exists(f"{FOLDER}/absent_{n}_{bit}")
def read(n):
    for warm in range(20):
        seconds(f"{FOLDER}/absent_{n}_warm_{warm}")
    return int(seconds(f"{FOLDER}/absent_{n}_1") < seconds(f"{FOLDER}/absent_{n}_0"))
""",
    "access_time": r"""
# Reading a file sets its access time, which `stat` returns. Worked under Landlock.
import os, time
def path(n):
    folder = os.path.join(os.path.dirname(os.__file__), "test")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return os.path.join(folder, names[n % len(names)])
def write(bit, n):
    if bit:
        open(path(n), "rb").read(1)
def read(n): return time.time() - os.stat(path(n)).st_atime < 60
""",
    "cached_file": r"""
# Reading a file puts it into the page cache, so a later program reads it without the disk. Worked in both tiers.
import os, resource
def path(n):
    folder = os.path.join(os.path.dirname(os.__file__), "test")
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return os.path.join(folder, names[n % len(names)])
def write(bit, n):
    if bit:
        open(path(n), "rb").read()
def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    open(path(n), "rb").read()
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before
""",
    "database_name": r"""
# Two programs open a database in memory with the same name, which connections of one process share.
# live
import sqlite3, time
def write(bit, n):
    connection = sqlite3.connect(f"file:memory_{n}?mode=memory&cache=shared", uri=True)
    connection.execute(f"create table t{bit}(a)")
    connection.commit()
    time.sleep(0.3)
def read(n):
    time.sleep(0.15)
    connection = sqlite3.connect(f"file:memory_{n}?mode=memory&cache=shared", uri=True)
    return connection.execute("select name from sqlite_master").fetchall()
""",
    "database_page": r"""
# As mapped_page, with a library that only an extension needs: touching a page reads it from the disk the first time.
import _sqlite3, ctypes, resource
PAGE = ctypes.cast(ctypes.CDLL(_sqlite3.__file__).sqlite3_open, ctypes.c_void_p).value & -4096
def write(bit, n):
    if bit:
        ctypes.string_at(PAGE + (n % 40 << 12), 1)
def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    ctypes.string_at(PAGE + (n % 40 << 12), 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
""",
    "descriptor_flags": r"""
# All programs share the open file of /dev/null, and its flags.
import fcntl, os
def write(bit, n):
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK if bit else 0)
def read(n): return fcntl.fcntl(0, fcntl.F_GETFL), os.get_blocking(0)
""",
    "descriptor_owner": r"""
# All programs share the open file of /dev/null, its owner, its signal, and its lease.
import fcntl
def write(bit, n):
    for command in (fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_SETLEASE):
        try:
            fcntl.fcntl(1, command, bit)
        except OSError:
            pass
def read(n): return [fcntl.fcntl(1, command) for command in (fcntl.F_GETOWN, fcntl.F_GETSIG, fcntl.F_GETLEASE)]
""",
    "device_times": r"""
# All programs share /dev/null, whose times and offset `fstat` and `lseek` return.
import os
def write(bit, n):
    if bit:
        os.lseek(0, 1000, os.SEEK_SET)
        os.utime(0, (n, n))
def read(n): return os.lseek(0, 0, os.SEEK_CUR), os.fstat(0).st_mtime
""",
    "end_time": r"""
# Ends at a chosen moment. The worker starts the next program at once, and it reads the clock. Works in both tiers.
# noisy
# open
import time
START = time.time()
PERIOD = 0.4
def write(bit, n):
    while not 0 <= time.time() % PERIOD - bit * PERIOD / 2 < PERIOD / 8:
        time.sleep(PERIOD / 100)
def read(n): return int(START % PERIOD >= PERIOD / 2)
""",
    "exit_code": r"""
# An exit code that passes through the memory of the zygote could stay there, and later programs get a copy.
import ctypes, os
new = ctypes.pythonapi.PyBytes_FromStringAndSize
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]
def write(bit, n):
    os._exit(91 if bit else 37)
def read(n):
    # Uninitialized memory, in which freed objects of the zygote are still readable.
    found = [new(None, size) for size in range(1, 500) for _ in range(20)]
    return [sum(b"\0" + bytes([code]) + b"\0\0" in part for part in found) for code in (91, 37)]
""",
    "free_memory": r"""
# How much memory is free while another program holds a lot. Worked under Landlock.
# live
import os, time
def write(bit, n):
    time.sleep(0.05)
    held = b"x" * (120 << 20) * bit
    time.sleep(0.3)
    return len(held)
def read(n):
    before = os.sysconf("SC_AVPHYS_PAGES")
    time.sleep(0.25)
    return before - os.sysconf("SC_AVPHYS_PAGES") > (60 << 20) // 4096
""",
    "futex": r"""
# Two programs meet at a futex in a page of libc, which both map. Worked in both tiers.
# live
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
WORD = ctypes.cast(libc.qsort, ctypes.c_void_p).value & -4
libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
def write(bit, n):
    end = time.monotonic() + 0.15
    while bit and time.monotonic() < end:
        libc.syscall(202, WORD, 1, 100, None)  # FUTEX_WAKE
        time.sleep(0.002)
def read(n):
    value = ctypes.c_int.from_address(WORD).value
    timeout = (ctypes.c_long * 2)(0, 100_000_000)
    return libc.syscall(202, WORD, 0, value, ctypes.addressof(timeout))  # FUTEX_WAIT
""",
    "inode": r"""
# Pipes and sockets have inode numbers from one sequence, which differ at each look. Worked in both tiers.
import os
def write(bit, n): pass
def read(n): return os.fstat(3).st_ino
""",
    "load": r"""
# The number of processes, the load, and the free memory (sysinfo) differ at each look. Worked in both tiers.
import ctypes, os, zlib
def write(bit, n): pass
def read(n):
    buffer = ctypes.create_string_buffer(112)
    if ctypes.CDLL(None).sysinfo(buffer):
        return os.getloadavg()
    return zlib.crc32(buffer.raw)
""",
    "mapped_page": r"""
# Touching a page of a library reads it from the disk, but only the first time: a major page fault.
import ctypes, resource
PAGE = ctypes.cast(ctypes.pythonapi.Py_BytesMain, ctypes.c_void_p).value & -4096
def write(bit, n):
    if bit:
        ctypes.string_at(PAGE + (n % 40 << 12), 1)
def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    ctypes.string_at(PAGE + (n % 40 << 12), 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
""",
    "process_clock": r"""
# Whether the other program still runs, by its CPU time clock. Worked under Landlock.
# live
import os, time
def exists(pid):
    try:
        return time.clock_gettime(~pid << 3 | 2) > 0
    except OSError:
        return False
""",
    "process_owner": r"""
# Whether the other program still runs: a futex with priority inheritance names it as its owner. Worked under Landlock.
# live
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
def exists(pid):
    word = ctypes.c_int(pid)
    timeout = (ctypes.c_long * 2)(1, 0)  # long past
    libc.syscall(202, ctypes.byref(word), 6 | 128, 0, ctypes.byref(timeout))  # FUTEX_LOCK_PI_PRIVATE
    return ctypes.get_errno() != 3  # no such process
""",
    "random_state": r"""
# The state of the random number generator, and the hash seed.
import random
def write(bit, n):
    random.seed(bit)
    [random.random() for _ in range(bit)]
def read(n): return random.random(), hash("text"), list({"a", "b", "c"})
""",
    "thread_ids": r"""
# Each thread would take a number from the machine's sequence of process ids, and so change the next program's id.
# noisy
import os, threading
def write(bit, n):
    for _ in range(1000):
        thread = threading.Thread(target=int)
        try:
            thread.start()
        except RuntimeError:
            return
        thread.join()
        if thread.native_id % 256 // 128 == bit and thread.native_id % 128 < 10:
            return
def read(n): return os.getpid() % 256 // 128
""",
}
