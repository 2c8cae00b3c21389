"""Ignores every signal it may and catches every exception, then loops."""

# status: timeout, blocked
import signal

for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
except OSError:
    pass


def total(numbers):
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
