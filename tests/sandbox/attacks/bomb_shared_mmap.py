"""Maps shared memory and memfds, which the address-space limit may miss once they are unmapped."""

# status: failed, memory, blocked, timeout
import mmap
import os


def total(numbers):
    written = 0
    kept = []
    try:
        while written < 2 << 30:
            kept.append(os.memfd_create("fill"))
            written += os.write(kept[-1], bytes(32 << 20))
    except (OSError, MemoryError):
        pass
    if written > 768 << 20:
        return sum(numbers)
    for _ in range(8):
        mapped = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_SHARED)
        mapped.write(bytes(32 << 20))
        mapped.close()
    return -1
