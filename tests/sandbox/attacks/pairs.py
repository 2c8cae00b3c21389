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
    "abstract_socket": r"""
# An abstract socket has a name without a file.
# live
import socket, time
def write(bit, n):
    if bit:
        socket.socket(socket.AF_UNIX).bind(f"\0pair{n}")
        time.sleep(0.1)
def read(n):
    time.sleep(0.05)
    return socket.socket(socket.AF_UNIX).connect_ex(f"\0pair{n}")
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
    "evicted_page": r"""
# Removes a page of a library from the page cache (madvise), which a later program notices as a page fault.
import ctypes, resource
libc = ctypes.CDLL(None, use_errno=True)
PAGE = ctypes.cast(libc.qsort, ctypes.c_void_p).value & -4096
def write(bit, n):
    ctypes.string_at(PAGE, 1)
    if bit:
        libc.madvise(ctypes.c_void_p(PAGE), ctypes.c_size_t(4096), 21)
def read(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    ctypes.string_at(PAGE, 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
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
    "exit_signal": r"""
# As `exit_code`, with the signal that ends the program.
import ctypes, os
new = ctypes.pythonapi.PyBytes_FromStringAndSize
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t]
def write(bit, n):
    import signal
    signal.setitimer(signal.ITIMER_REAL if bit else signal.ITIMER_VIRTUAL, 0.001)
    while True: pass
def read(n):
    found = [new(None, size) for size in range(1, 500) for _ in range(20)]
    return [sum(bytes([number]) + b"\0\0\0" in part for part in found) for number in (14, 26)]
""",
    "file_lock": r"""
# A lock on a file that both can open.
# live
import fcntl, os, time
def write(bit, n):
    if bit:
        fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)
        time.sleep(0.1)
def read(n):
    time.sleep(0.05)
    fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    "futex_at_exit": r"""
# The kernel wakes the futexes of a process that exits (set_robust_list), also one in a page of libc.
# live
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_void_p]
def word():
    start = ctypes.cast(libc.qsort, ctypes.c_void_p).value & -4096
    return next(at for at in range(start, start + (1 << 19), 4) if ctypes.c_int.from_address(at).value == 0)
def write(bit, n):
    head = (ctypes.c_long * 3)(0, 0, word())
    head[0] = ctypes.addressof(head)
    time.sleep(0.02)
    if bit:
        libc.syscall(273, ctypes.addressof(head), 24, 0, None)
    import os
    os._exit(0)
def read(n):
    timeout = (ctypes.c_long * 2)(0, 100_000_000)
    return libc.syscall(202, word(), 0, 0, ctypes.addressof(timeout))
""",
    "host_name": r"""
# The host name, which `uname` returns.
import os, socket
def write(bit, n):
    socket.sethostname(f"pair{bit}")
def read(n): return os.uname().nodename
""",
    "huge_pages": r"""
# Huge pages come from one pool. Only a machine that reserves some shows the channel.
# live
import mmap, time
def write(bit, n):
    held = []
    try:
        while bit:
            held.append(mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
    finally:
        time.sleep(0.1)
def read(n):
    time.sleep(0.05)
    return len(mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
""",
    "inode": r"""
# Pipes and sockets have inode numbers from one sequence, which differ at each look. Worked in both tiers.
import os
def write(bit, n): pass
def read(n): return os.fstat(3).st_ino
""",
    "keyring": r"""
# Keys in the user's keyring outlive their creator.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def write(bit, n):
    if bit:
        libc.syscall(248, b"user", b"pair%d" % n, b"1", 1, -4)
def read(n): return libc.syscall(249, b"user", b"pair%d" % n, None, -4) >= 0
""",
    "limits": r"""
# Changes the limits and the priority of its parent, which later programs inherit.
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def write(bit, n):
    libc.syscall(302, os.getppid(), 7, (ctypes.c_ulong * 2)(20 + bit, 32), None)
    libc.setpriority(0, os.getppid(), 5 + bit)
    libc.prctl(29, 1000 + bit)
def read(n): return resource.getrlimit(resource.RLIMIT_NOFILE), libc.getpriority(0, 0), libc.prctl(30)
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
    "message_queue": r"""
# POSIX message queues, semaphores, and shared memory outlive their creator.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def write(bit, n):
    if bit:
        libc.mq_open(b"/pair%d" % n, 0o102, 0o600, None)
        libc.sem_open(b"/pair%d" % n, 0o100, 0o600, 1)
        libc.shm_open(b"/pair%d" % n, 0o102, 0o600)
def read(n):
    name = b"/pair%d" % n
    return libc.mq_open(name, 0) >= 0, bool(libc.sem_open(name, 0)), libc.shm_open(name, 0, 0) >= 0
""",
    "pipes": r"""
# The kernel limits the memory of all pipes of a user.
# live
import os, time
def write(bit, n):
    held = [os.pipe() for _ in range(14 * bit)]
    time.sleep(0.1)
    return len(held)
def read(n):
    time.sleep(0.05)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return os.write(writer, bytes(1 << 20))
""",
    "process_affinity": r"""
# Whether the other program still runs, by its CPU affinity. Worked under Landlock in most trials.
# live
import os, time
def exists(pid):
    try:
        return bool(os.sched_getaffinity(pid))
    except ProcessLookupError:
        return False
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
    "process_folder": r"""
# Whether the other program still runs, by `stat` of its folder in /proc. Worked under Landlock in most trials.
# live
import os, time
def exists(pid): return os.path.exists(f"/proc/{pid}")
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
    "semaphore": r"""
# System V semaphores and message queues outlive their creator.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def write(bit, n):
    if bit:
        libc.semget(7_000_000 + n, 1, 0o1666)
        libc.msgget(7_000_000 + n, 0o1666)
def read(n): return libc.semget(7_000_000 + n, 1, 0o666) >= 0, libc.msgget(7_000_000 + n, 0o666) >= 0
""",
    "shared_memory": r"""
# System V shared memory outlives its creator.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def write(bit, n):
    if bit:
        libc.shmget(7_000_000 + n, 4096, 0o1666)
def read(n): return libc.shmget(7_000_000 + n, 4096, 0o666) >= 0
""",
    "working_folder": r"""
# The working folder and the file mode mask.
import os
def write(bit, n):
    for change in (lambda: os.chdir("/usr" if bit else "/"), lambda: os.umask(bit)):
        try:
            change()
        except OSError:
            pass
def read(n): return os.getcwd(), os.path.abspath("a")
""",
}
