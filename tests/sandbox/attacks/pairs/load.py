"""The number of processes and the load average (sysinfo), which differ at each look."""

import ctypes
import os


def write(bit, n):
    pass


def read(n):
    buffer = ctypes.create_string_buffer(112)
    ctypes.CDLL(None).sysinfo(buffer)
    return buffer.raw, os.getloadavg()
