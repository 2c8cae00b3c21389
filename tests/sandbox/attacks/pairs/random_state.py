"""The state of the random number generator, and the hash seed."""

import random


def write(bit, n):
    random.seed(bit)
    [random.random() for _ in range(bit)]


def read(n):
    return random.random(), hash("text"), list({"a", "b", "c"})
