"""Gives the compiler an expression nested beyond its stack, and one of a million signs."""


# status: crashed, failed, memory, timeout
def total(numbers):
    for text in ("(" * 100_000 + ")" * 100_000, "-" * 1_000_000 + "1", "+".join("1" * 1_000_000), "x" + ".x" * 500_000):
        try:
            compile(text, "<attack>", "eval")
        except (SyntaxError, MemoryError, RecursionError):
            pass
    return -1
