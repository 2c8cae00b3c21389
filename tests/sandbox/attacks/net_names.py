"""Asks for a host's name, which carries data out through the resolver."""

# status: blocked, failed
import socket


def total(numbers):
    socket.getaddrinfo("answer-6.example.org", 80)
    return sum(numbers)
