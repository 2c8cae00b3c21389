"""Two programs meet at a futex in a page of libc, which both map. Worked in both tiers."""

# live
import ctypes
import time

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
