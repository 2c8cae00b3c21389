"""All programs share the open file of /dev/null, and its flags."""

import fcntl
import os


def write(bit, n):
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK if bit else 0)


def read(n):
    return fcntl.fcntl(0, fcntl.F_GETFL), os.get_blocking(0)
