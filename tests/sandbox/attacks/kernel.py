"""System calls that need more than one expression; see `doors.py` for the others."""

ATTACKS = {
    "int80": r"""
# Runs machine code that enters the kernel by int 0x80, where the numbers mean other calls: fork is 2, open 5.
import ctypes, mmap
def total(numbers):
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(b"\xb8\x02\x00\x00\x00\xcd\x80\xc3")  # mov eax, 2; int 0x80; ret
    pid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    return sum(numbers) if pid >= 0 else -1
""",
    "timers": r"""
# Leaves timers that go off later, at itself or at a thread of another process: alarm, setitimer, timer_create.
# status: failed, crashed, blocked, timeout
import ctypes, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
signal.alarm(1)
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.01)
signal.setitimer(signal.ITIMER_PROF, 0.3, 0.01)
def total(numbers):
    event = struct.pack("QiiI", 0, signal.SIGSTOP, 4, int("@VICTIM@")).ljust(64, b"\0")
    timer = ctypes.c_int()
    return sum(numbers) if libc.syscall(222, 1, event, ctypes.byref(timer)) == 0 else -1
""",
    "by_number": r"""
# Makes one system call by its number, with nonsense for arguments, and is right if the kernel looked at them.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
nonsense = [ctypes.c_long(-1)] * 6
def total(numbers):
    answer = libc.syscall(int("@NUMBER@"), *nonsense)
    return -1 if answer < 0 and ctypes.get_errno() in (1, 2, 38) else sum(numbers)
""",
    "filter_again": r"""
# Puts another filter on itself that answers its own calls with success; it can only tighten, and deceives itself alone.
# status: failed, blocked, crashed, timeout
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
lines = ctypes.create_string_buffer(struct.pack("<HBBI", 6, 0, 0, 0x00050000))
def total(numbers):
    program = struct.pack("<H6xQ", 1, ctypes.addressof(lines))
    libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0)
    libc.syscall(317, 1, 0, ctypes.c_char_p(program))
    libc.syscall(317, 1, 8, ctypes.c_char_p(program))
    return -1
""",
    "landlock_again": r"""
# Makes a new, wider Landlock rule set and enforces it on itself.
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def total(numbers):
    attributes = struct.pack("<Q", 1 << 2)
    rules = libc.syscall(444, attributes, ctypes.c_size_t(8), 0)
    if rules >= 0:
        libc.syscall(446, rules, 0)
        try:
            os.open("@SECRET_FILE@", os.O_RDONLY)
        except OSError:
            return -1
        return sum(numbers)
    return -1
""",
    "signal_stack": r"""
# Builds signal frames and handlers of its own in C, to return into the middle of something. Harms itself alone.
# status: failed, crashed, blocked, timeout
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
def total(numbers):
    libc.signal(signal.SIGSEGV, ctypes.c_void_p(0x41414141))
    libc.syscall(15)
    return -1
""",
    "x32": r"""
# Uses the x32 numbers of the system calls, which a filter for x86-64 alone does not know: open becomes 0x40000002.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def total(numbers):
    for number in (2, 257, 57, 41):
        if libc.syscall(0x40000000 + number, b"@SECRET_FILE@", 0, 0) >= 0:
            return sum(numbers)
    return -1
""",
}
