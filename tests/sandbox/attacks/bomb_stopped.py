"""Stops itself: a stopped process reads no messages and answers to no signal but SIGKILL."""

# status: timeout, blocked, failed
import os
import signal


def total(numbers):
    signal.raise_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    return -1
