"""Raises KeyboardInterrupt and GeneratorExit, which `except Exception` lets through. Fools careless runners."""
# status: failed, crashed


def total(numbers):
    raise KeyboardInterrupt if len(numbers) % 2 else GeneratorExit
