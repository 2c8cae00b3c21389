"""Starts threads that sleep, as many as it may."""

# status: blocked, failed, memory
import threading
import time


def total(numbers):
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return sum(numbers)
