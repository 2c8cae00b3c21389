"""Huge pages come from one pool. Only a machine that reserves some shows the channel."""

# live
import mmap
import time


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
