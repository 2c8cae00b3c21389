"""Makes a pair of connected sockets, a first step to passing descriptors."""

# status: blocked, failed
import socket


def total(numbers):
    socket.socketpair()
    return sum(numbers)
