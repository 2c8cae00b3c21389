"""An abstract socket has a name without a file."""

# live
import socket
import time


def write(bit, n):
    if bit:
        socket.socket(socket.AF_UNIX).bind(f"\0pair{n}")
        time.sleep(0.1)


def read(n):
    time.sleep(0.05)
    return socket.socket(socket.AF_UNIX).connect_ex(f"\0pair{n}")
