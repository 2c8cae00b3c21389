"""Ends at a chosen moment. The worker starts the next program at once, and it reads the clock. Works in both tiers."""

# noisy
# open
import time

START = time.time()
PERIOD = 0.4


def write(bit, n):
    while not 0 <= time.time() % PERIOD - bit * PERIOD / 2 < PERIOD / 8:
        time.sleep(PERIOD / 100)


def read(n):
    return int(START % PERIOD >= PERIOD / 2)
