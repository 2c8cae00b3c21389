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
    "by_number": r"""
# Makes one system call by its number, with nonsense for arguments, and is right if the kernel looked at them.
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
nonsense = [ctypes.c_long(-1)] * 6
def total(numbers):
    answer = libc.syscall(int("@NUMBER@"), *nonsense)
    return -1 if answer < 0 and ctypes.get_errno() in (1, 2, 38) else sum(numbers)
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
