"""Starts a thread; programs have one. (A program that never starts one is never in its way.)"""

# status: blocked, failed
import threading


def total(numbers):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    return sum(numbers)
