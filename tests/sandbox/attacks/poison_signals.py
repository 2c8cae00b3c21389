"""Leaves handlers, masks, alarms and pending signals behind for whoever comes next."""

# status: failed, crashed, blocked
import signal

for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.set_wakeup_fd(-1)


def total(numbers):
    return -1
