"""How much memory is free while another program holds a lot. Worked under Landlock and bubblewrap."""

# live
import os
import time


def write(bit, n):
    time.sleep(0.06)
    if bit:
        held = b"x" * (150 << 20)
        time.sleep(0.15)
        return len(held)


def read(n):
    before = os.sysconf("SC_AVPHYS_PAGES")
    time.sleep(0.18)
    return before - os.sysconf("SC_AVPHYS_PAGES") > (80 << 20) // 4096
