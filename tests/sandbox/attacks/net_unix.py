"""Connects to a Unix socket of the user: an ssh agent, a container engine, a session bus."""

# status: blocked, failed
import socket


def total(numbers):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("@UNIX@")
    return sum(numbers)
