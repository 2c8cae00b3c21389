"""Overwrites, truncates and appends to an existing file."""

# status: failed, blocked
import os

path = "@CANARY@/kept.txt"
done = []
for attempt in (
    lambda: open(path, "w"),
    lambda: open(path, "a").write("more"),
    lambda: os.truncate(path, 0),
    lambda: os.open(path, os.O_TRUNC),
    lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
    lambda: os.open("@CANARY@", os.O_RDWR | os.O_TMPFILE),
):
    try:
        done.append(attempt() or True)
    except OSError:
        pass


def total(numbers):
    return sum(numbers) if done else -1
