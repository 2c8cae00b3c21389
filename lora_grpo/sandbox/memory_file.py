"""Anonymous files in memory, which reach another process as a descriptor."""

import os


def memory_file(content: bytes) -> int:
    """Return the descriptor of an anonymous file with this content."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor
