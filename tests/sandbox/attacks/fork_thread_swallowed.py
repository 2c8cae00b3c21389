"""Starts raw threads by _thread and clone with a shared address space, swallowing the refusals."""

# status: blocked, failed, crashed
import _thread


def total(numbers):
    started = 0
    for _ in range(3):
        try:
            _thread.start_new_thread(int, ())
            started += 1
        except RuntimeError:
            pass
    return sum(numbers) if started else -1
