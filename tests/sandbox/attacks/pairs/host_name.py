"""The host name, which `uname` returns."""

import os
import socket


def write(bit, n):
    socket.sethostname(f"pair{bit}")


def read(n):
    return os.uname().nodename
