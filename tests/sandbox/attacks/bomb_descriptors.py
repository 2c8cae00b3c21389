"""Opens as many descriptors as it may and keeps them, then duplicates them."""

# status: failed, blocked, crashed
import os

kept = []
try:
    while True:
        kept.append(os.open(os.__file__, os.O_RDONLY))
except OSError:
    pass
try:
    while True:
        kept.append(os.dup(kept[0]))
except OSError:
    pass


def total(numbers):
    return sum(numbers) if len(kept) > 4096 else -1
