"""Inflates a few kilobytes to gigabytes, and asks for a pattern of a billion groups."""

# status: memory, failed, timeout
import re
import zlib


def total(numbers):
    small = zlib.compress(bytes(50_000_000), 9)
    kept = [zlib.decompress(small) for _ in range(1000)]
    return len(re.compile("(?:a{1,65535}){1,65535}").pattern) + len(kept)
