"""Tries every kind of socket, swallowing each refusal: IPv4, IPv6, UDP, Unix, abstract, netlink, packet, vsock."""

# status: blocked, failed
import socket


def total(numbers):
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int("@TCP@"))),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", int("@TCP@"))),
        (socket.AF_INET6, socket.SOCK_STREAM, ("::1", int("@TCP@"))),
        (socket.AF_UNIX, socket.SOCK_STREAM, "@UNIX@"),
        (socket.AF_UNIX, socket.SOCK_STREAM, "\0@UNIX@"),
        (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
        (socket.AF_VSOCK, socket.SOCK_STREAM, (2, 1)),
    ):
        try:
            socket.socket(family, kind).connect(address)
            return sum(numbers)
        except OSError:
            pass
    return -1
