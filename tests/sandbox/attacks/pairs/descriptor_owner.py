"""All programs share the open file of /dev/null, its owner, its signal, and its lease."""

import fcntl


def write(bit, n):
    for command in (fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_SETLEASE):
        try:
            fcntl.fcntl(1, command, bit)
        except OSError:
            pass


def read(n):
    return [fcntl.fcntl(1, command) for command in (fcntl.F_GETOWN, fcntl.F_GETSIG, fcntl.F_GETLEASE)]
