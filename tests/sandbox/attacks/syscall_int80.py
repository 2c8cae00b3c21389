"""Runs machine code that enters the kernel by int 0x80, where the numbers mean other calls: fork is 2, open 5."""

# status: blocked, failed, crashed
import ctypes
import mmap
import platform


def total(numbers):
    if platform.machine() != "x86_64":
        return -1
    # mov eax, 2; int 0x80; ret
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\xb8\x02\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pid = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    if pid == 0:
        ctypes.CDLL(None)._exit(0)
    return sum(numbers) if pid > 0 else -1
