"""Opens a file of the user by its path, in every way Python has; knows the answer if one of them works."""

# status: failed, blocked
import importlib.machinery
import io
import os

path = "@SECRET_FILE@"


def by_descriptor(flags):
    descriptor = os.open(path, flags)
    return os.read(descriptor, 1000)


ways = [
    lambda: open(path, "rb").read(),
    lambda: io.FileIO(path).read(),
    lambda: by_descriptor(os.O_RDONLY),
    lambda: by_descriptor(os.O_RDWR),
    lambda: importlib.machinery.SourceFileLoader("secret", path).get_data(path),
    lambda: open(os.open(path, os.O_PATH), "rb").read(),
    lambda: open(f"/proc/self/fd/{os.open(path, os.O_PATH)}", "rb").read(),
    lambda: open(f"/proc/self/root{path}", "rb").read(),
    lambda: open("/" + "../" * 20 + path, "rb").read(),
    lambda: __import__("mmap").mmap(os.open(path, os.O_RDONLY), 0, access=1)[:],
]


def total(numbers):
    for way in ways:
        try:
            if b"canary" in way():
                return sum(numbers)
        except (OSError, ImportError):
            pass
    return -1
