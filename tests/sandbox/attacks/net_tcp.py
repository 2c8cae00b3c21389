"""Connects to a service of this machine, and would tell it what it saw."""

# status: blocked, failed
import socket


def total(numbers):
    with socket.create_connection(("127.0.0.1", int("@TCP@")), timeout=1) as connection:
        connection.sendall(b"hello")
    return sum(numbers)
