"""Changes modules for whoever comes next: math, json, builtins, random's seed, sys.path."""

# status: failed
import builtins
import json
import math
import random
import sys

builtins.poisoned = math.poisoned = json.poisoned = True
builtins.sum = builtins.len = builtins.range = math.isclose = json.loads = lambda *_, **__: 0
random.seed(1)
sys.path[:] = ["/tmp"]
sys.modules["re"] = sys.modules["collections"] = None


def total(numbers):
    return -1
