"""Waits for input that never comes: select, a pipe, a lock, a signal."""

# status: timeout, blocked, failed
import os
import signal
import threading


def total(numbers):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    os.read(os.pipe()[0], 1)
    signal.pause()
