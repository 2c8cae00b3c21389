"""How much memory is free while another program holds a lot. Worked under Landlock."""

# live
import os
import time


def write(bit, n):
    time.sleep(0.05)
    held = b"x" * (120 << 20) * bit
    time.sleep(0.3)
    return len(held)


def read(n):
    before = os.sysconf("SC_AVPHYS_PAGES")
    time.sleep(0.25)
    return before - os.sysconf("SC_AVPHYS_PAGES") > (60 << 20) // 4096
