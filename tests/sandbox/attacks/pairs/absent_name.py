"""Looking up a name that does not exist makes the next look-up faster. Worked under Landlock."""

# noisy
import os
import time

FOLDER = os.path.dirname(os.__file__)


def seconds(name):
    started = time.perf_counter()
    os.path.exists(name)
    return time.perf_counter() - started


def write(bit, n):
    for _ in range(3):
        os.path.exists(f"{FOLDER}/absent_{n}_{bit}")


def read(n):
    for warm in range(20):
        seconds(f"{FOLDER}/absent_{n}_warm_{warm}")
    return int(seconds(f"{FOLDER}/absent_{n}_1") < seconds(f"{FOLDER}/absent_{n}_0"))
